"""Parses the bodies of OpenAI's completions and chat completions."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from mpjax.constraints.kinds import Constraint
from mpjax.engine.options import TooLongError
from mpjax.files.json_text import json_text
from mpjax.language_model import LanguageModel
from mpjax.sampling.controls import Penalties, changes_logits
from mpjax.sampling.generation_config import to_fields
from mpjax.sampling.settings import FILTERS, Sampling
from mpjax.serve.constraints import of_chat, read_constraint
from mpjax.serve.errors import NOT_OFFERED, TOO_LONG, RequestError
from mpjax.serve.keys import read_keys
from mpjax.serve.messages import read_messages
from mpjax.serve.tables import CHAT, COMPLETION, PROMPT
from mpjax.serve.tools import Tools, read_tools
from mpjax.text.channels import HARMONY
from mpjax.text.prompts import encode, is_single
from mpjax.text.tokenizer import Tokenizer

PENALTIES = Penalties.names
LISTS = ("bad_words", "logit_bias")  # keys that a model's own sampling settings may have
# Name in the engine's error messages → key of the request.
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "allowed_ids": "allowed_token_ids",
}

# OpenAI's reasoning efforts → the nearest that gpt-oss has.
OF_HARMONY = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def refusal_of_engine(
    error: ValueError, status: int, prompts: str, constraint: str = "response_format"
) -> RequestError:
    """An engine's error as a RequestError, with the names of the request's keys.

    prompts, constraint: the request's keys of the prompts and of the constraint.
    """
    message = str(error)
    for name, key in NAMES.items():
        message = message.replace(name, key)
    if isinstance(error, TooLongError):
        return RequestError(message, prompts, status, TOO_LONG)
    if message.startswith("constraint"):
        return RequestError(message.replace("constraint:", f"{constraint}:", 1), constraint, status)
    first = message.partition(" ")[0]
    return RequestError(message, first if first in COMPLETION else None, status)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A parsed request.

    prompts: token ids of each prompt. key: the body's key that has them.
    max_new_tokens: None for the most that a request may have.
    sampling, stop, priority: as for Engine.submit. seed: of the first choice; each further choice
        has the next integer.
    model: the `model` of the request, or None.
    choices: the number of answers that are returned for each prompt. generated: the number that are
        generated, of which they are the best; 0 if it is the same. stream: whether the text is
        streamed. with_usage: whether a stream ends with the usage.
    echoes: the texts of the prompts, if the answers repeat them. logprobs: whether
        log-probabilities are requested. top: the number of likeliest tokens given beside each.
    tools: the tools that the model may call, or None. repeated: the request's values that the
        answer repeats. namespaces: of tools, by tool name.
    constraint: of each choice. constraint_key: the body's key that has it.
    """

    prompts: list[list[int]]
    max_new_tokens: int | None
    sampling: dict[str, Any]
    stop: list[str]
    seed: int
    key: str = "prompt"
    model: str | None = None
    choices: int = 1
    generated: int = 0
    stream: bool = False
    with_usage: bool = False
    echoes: list[str] | None = None
    logprobs: bool = False
    top: int = 0
    priority: int = 0
    tools: Tools | None = None
    repeated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    namespaces: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constraint: Constraint | None = None
    constraint_key: str = "response_format"

    @property
    def requests(self) -> int:
        """The number of requests for each prompt."""
        return self.generated or self.choices

    @property
    def candidates(self) -> int:
        """The number of candidates that the engine returns; 0 where a greedy token is the top 1."""
        is_greedy = not self.sampling["temperature"] and "min_new_tokens" not in self.sampling
        is_greedy &= self.constraint is None and not changes_logits(Sampling.of(self.sampling))
        return self.top if self.top > 1 or not is_greedy else 0


def read_completion(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> Asked:
    """Parses the body of /v1/completions.

    ignore_unknown: whether unknown keys are ignored. Raises RequestError, which names the key.
    """
    values = read_keys(require_object(body), COMPLETION, ignore_unknown)
    of, choices = values["best_of"] or values["n"], values["n"]
    if of < choices or (of > choices and values["stream"]):
        wanted = "no stream, since the best are known at the end" if of > choices else "n or more"
        raise RequestError(f"best_of is {of} and n {choices}: expected {wanted}", "best_of")
    texts, prompts = _prompts(lm, values["prompt"])
    wanted, maximum, echo = values["logprobs"], values["max_tokens"], values["echo"]
    if maximum == 0 and not echo:
        raise RequestError("max_tokens is 0, which leaves only the prompt: set echo", "max_tokens")
    if echo and (wanted is not None or maximum == 0) and values["stream"]:
        raise RequestError("a prompt's log-probabilities come whole: leave stream out", "stream")
    return _shared(
        lm,
        values,
        prompts,
        generated=of,
        max_new_tokens=maximum,
        echoes=texts if echo else None,
        logprobs=wanted is not None,
        top=wanted or 0,
    )


def require_object(body: Any) -> dict[str, Any]:
    """The body. Raises RequestError if it is not a JSON object."""
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def _prompts(lm: LanguageModel, found: Any) -> tuple[list[str], list[list[int]]]:
    """The text and the ids of each prompt.

    The text of ids includes special tokens. Raises RequestError for anything but texts and ids.
    """
    batch = [found] if is_single(found) else found
    if not isinstance(batch, list) or not all(map(_is_prompt, batch)):
        raise RequestError(f"prompt is {json_text(found)}: expected {PROMPT}", "prompt")
    tokenizer = lm.require_tokenizer()
    try:
        ids = encode(tokenizer, batch, lm.config.vocab_size)
    except ValueError as error:
        raise RequestError(str(error), "prompt") from error
    texts = (one if isinstance(one, str) else tokenizer.decode(one, False) for one in batch)
    return list(texts), ids


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and all(type(one) is int for one in value)
    return is_ids or isinstance(value, str)


def read_chat(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> Asked:
    """Parses the body of /v1/chat/completions. Arguments and errors are as for completions."""
    values = read_keys(require_object(body), CHAT, ignore_unknown)
    tools = read_tools(values, lm.require_tokenizer().style.tools)
    ids = chat_ids(lm, values, tools)
    maximum, wanted, top = (
        values["max_completion_tokens"],
        values["logprobs"],
        values["top_logprobs"],
    )
    if top and not wanted:
        raise RequestError(
            f"top_logprobs is {top}, and logprobs is not true: set logprobs to true, or leave "
            "top_logprobs out",
            "top_logprobs",
        )
    maximum = values["max_tokens"] if maximum is None else maximum
    found = {"max_new_tokens": maximum, "logprobs": wanted, "top": top, "tools": tools}
    asked = _shared(lm, values, [ids], key="messages", **found)
    constraint = of_chat(asked.constraint, tools, lm.require_tokenizer(), ids)
    key = asked.constraint_key if asked.constraint is not None else "tools"
    return dataclasses.replace(asked, constraint=constraint, constraint_key=key)


def chat_ids(
    lm: LanguageModel,
    values: Mapping[str, Any],
    tools: Tools | None,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
) -> list[int]:
    """The token ids of a chat's messages. values: of the body's keys.

    Raises RequestError, which names the key.
    """
    tokenizer = lm.require_tokenizer()
    variables = _variables(values, tokenizer)
    if tools is not None:
        variables["tools"] = [tool.definition for tool in tools.tools]
    if not tokenizer.chat_templates:
        raise RequestError(
            "the model has no chat template, like most base models: send a prompt to "
            "/v1/completions instead",
            "messages",
        )
    messages = read_messages(values["messages"])
    try:
        prompt = tokenizer.chat(messages, add_generation_prompt, **variables)
        return tokenizer.encode(prompt, add_special_tokens)
    except (ValueError, TypeError) as error:
        message = str(error).replace(tokenizer.name, "the model")  # the name is a server path
        raise RequestError(message, "messages") from error


def _variables(values: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat template's further variables. Raises RequestError for names that the server sets."""
    key = "chat_template_kwargs"
    variables = values[key]
    for name in ("messages", "self", "tools"):
        if name in variables:
            raise RequestError(f"{key} has {name!r}, which may not be among its keys", key)
    # A client may choose a template, but not send one: a program that could run forever.
    if variables.get("chat_template") not in (None, *tokenizer.chat_templates):
        raise RequestError(
            f"chat_template of {key} is not the name of a template of the model", key
        )
    return _effort(values.get("reasoning_effort"), tokenizer) | variables


def _effort(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The chat template's variables for a reasoning effort.

    Raises RequestError if the template has none, unless the effort is OpenAI's default.
    """
    sources = "".join(tokenizer.chat_templates.values())
    if effort is None:
        return {}
    found: dict[str, Any] = {}
    if "reasoning_effort" in sources:
        found["reasoning_effort"] = effort
        if tokenizer.style.channels is HARMONY:
            found["reasoning_effort"] = OF_HARMONY.get(effort, effort)
    if "enable_thinking" in sources:
        found["enable_thinking"] = effort != "none"
    if not found and effort != "medium":
        raise RequestError(
            f"reasoning_effort is {json_text(effort)}, and the chat template of the model has no "
            "such variable: leave it out",
            "reasoning_effort",
            code=NOT_OFFERED,
        )
    return found


def _shared(
    lm: LanguageModel, values: Mapping[str, Any], prompts: list[list[int]], **found: Any
) -> Asked:
    options, stream, seed, stop = (values[k] for k in ("stream_options", "stream", "seed", "stop"))
    if options is not None and not stream:
        raise RequestError(
            "stream_options is given, and stream is not true: set stream to true, or leave "
            "stream_options out",
            "stream_options",
        )
    constraint, constraint_key = read_constraint(values)
    return Asked(
        prompts=prompts,
        constraint=constraint,
        constraint_key=constraint_key,
        sampling=_sampling(values, lm),
        stop=stop if isinstance(stop, list) else [stop],
        seed=secrets.randbits(32) if seed is None else seed,
        model=values["model"],
        choices=values["n"],
        stream=stream,
        with_usage=bool(options and options["include_usage"]),
        priority=values["priority"],
        **found,
    )


def _sampling(values: Mapping[str, Any], lm: LanguageModel) -> dict[str, Any]:
    """The model's own sampling settings, overridden by those of the body.

    If the model's files have no settings, the temperature is 1, OpenAI's default.
    """
    own = lm.sampling
    sampling: dict[str, Any] = {"temperature": 1.0} if own is None else to_fields(own)
    names = ("temperature", *FILTERS, *PENALTIES)
    sampling |= {name: values[name] for name in names if values[name] is not None}
    # A temperature or top_p of 0 is greedy decoding.
    if not sampling.get("temperature") or sampling.get("top_p") == 0:
        names = (*PENALTIES, *LISTS, "min_new_tokens", "rules")
        kept = {name: sampling[name] for name in names if name in sampling}
        sampling = {"temperature": 0.0} | kept
    elif sampling.get("top_k") in (0, -1):  # other servers' values for "no top_k"
        sampling["top_k"] = None
    if least := values["min_tokens"]:
        sampling["min_new_tokens"] = least
    for key, name in (("stop_token_ids", "stop_ids"), ("allowed_token_ids", "allowed_ids")):
        if (ids := values[key]) is not None:
            sampling[name] = _known_ids(key, ids, lm.config.vocab_size)
    if biases := values["logit_bias"]:
        ids = _known_ids("logit_bias", [int(key) for key in biases], lm.config.vocab_size)
        sampling["logit_bias"] = dict(zip(ids, biases.values(), strict=True))
    if words := values["bad_words"]:
        sampling["bad_words"] = _bad_words(lm.require_tokenizer(), words)
    try:
        Sampling.of(sampling)
    except ValueError as error:
        raise refusal_of_engine(error, 400, "prompt") from error
    return sampling


def _known_ids(key: str, ids: list[Any], vocabulary: int) -> list[int]:
    """The ids. Raises RequestError for ids outside the model's vocabulary."""
    for one in ids:
        if not 0 <= one < vocabulary:
            raise RequestError(
                f"{key} has {json_text(one)}: expected token ids from 0 to {vocabulary - 1}", key
            )
    return [int(one) for one in ids]


def _bad_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """The token ids of each word, both at the begin of a text and after a space."""
    spelled = [text for word in words for text in (word, " " + word.lstrip())]
    found = (tokenizer.backend.encode(text, add_special_tokens=False).ids for text in spelled)
    return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]
