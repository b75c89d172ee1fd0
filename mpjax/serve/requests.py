"""Reads the bodies of OpenAI's completions and chat completions."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from mpjax.engine.state import CANDIDATES
from mpjax.generation_config import to_keys
from mpjax.json_text import json_text
from mpjax.kernels.checks import did_you_mean, nearest
from mpjax.language_model import LanguageModel
from mpjax.prompts import encode, is_single
from mpjax.sampling import FILTERS
from mpjax.serve.messages import read_messages
from mpjax.tokenizer import Tokenizer

SEEDS = 2**32
MOST_CHOICES = 128

# Keys that are not offered, and the values with which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
SHARED = {
    *("model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop"),
    *("seed", "logprobs", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("priority",),
}
COMPLETION = SHARED | {"prompt", "echo"}
CHAT = SHARED | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}


# The keys of clients for what the engine's messages call otherwise.
KEYS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
}


class RequestError(ValueError):
    """A body that can't be served. status: of HTTP. parameter: the key that is wrong, if one is."""

    def __init__(self, message: str, parameter: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.parameter, self.status = parameter, status

    @classmethod
    def of_engine(cls, error: ValueError, status: int) -> RequestError:
        """The refusal of an engine, in the client's words; most messages begin with the key."""
        message = str(error)
        for name, key in KEYS.items():
            message = message.replace(name, key)
        first = message.partition(" ")[0]
        return cls(message, first if first in SHARED else None, status)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The request in a body.

    prompts: ids of each prompt. max_new_tokens: None for as many as a request may have.
    sampling, stop, priority: as for Engine.submit. seed: of the first choice; the next has the next
        number.
    choices: of each prompt. stream: whether text comes as it is generated. with_usage: whether a
        stream ends with the numbers of tokens.
    echo: whether the prompt is part of the text. logprobs: whether log-probabilities are wanted,
        and top: of how many of the likeliest tokens beside each.
    """

    prompts: list[list[int]]
    max_new_tokens: int | None
    sampling: dict[str, Any]
    stop: list[str]
    seed: int
    choices: int = 1
    stream: bool = False
    with_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    top: int = 0
    priority: int = 0

    @property
    def candidates(self) -> int:
        """How many candidates the engine has to tell. Where a token is the likeliest, it is one."""
        is_greedy = not self.sampling["temperature"] and "min_new_tokens" not in self.sampling
        is_greedy &= self.sampling.get("repetition_penalty", 1) == 1
        return self.top if self.top > 1 or not is_greedy else 0


def read_completion(lm: LanguageModel, body: Any) -> Asked:
    """Reads the body of /v1/completions. Raises RequestError, which names the key."""
    _require_known(body, COMPLETION)
    prompts = _prompts(lm, body)
    wanted = _whole(body, "logprobs", None, 0, CANDIDATES)
    maximum = _whole(body, "max_tokens", 16, 0, None)
    echo = _bool(body, "echo")
    if maximum == 0 and not echo:
        raise RequestError("max_tokens is 0, which leaves only the prompt: set echo", "max_tokens")
    if echo and (wanted is not None or maximum == 0) and _bool(body, "stream"):
        raise RequestError("a prompt's log-probabilities come whole: leave stream out", "stream")
    return _shared(
        lm,
        body,
        prompts,
        max_new_tokens=maximum,
        echo=echo,
        logprobs=wanted is not None,
        top=wanted or 0,
    )


def _prompts(lm: LanguageModel, body: Mapping[str, Any]) -> list[list[int]]:
    """The ids of each prompt. Raises RequestError for anything but texts and token ids."""
    expected = "expected a text, token ids, or a list of them"
    if "prompt" not in body:
        raise RequestError(f"prompt is missing: {expected}", "prompt")
    found = body["prompt"]
    batch = [found] if is_single(found) else found
    if not isinstance(batch, list) or not all(map(_is_prompt, batch)):
        raise RequestError(f"prompt is {json_text(found)}: {expected}", "prompt")
    try:
        return encode(lm.require_tokenizer(), batch, lm.config.vocab_size)
    except ValueError as error:
        raise RequestError(str(error), "prompt") from error


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and all(type(one) is int for one in value)
    return is_ids or isinstance(value, str)


def read_chat(lm: LanguageModel, body: Any) -> Asked:
    """Reads the body of /v1/chat/completions. Raises RequestError, which names the key."""
    _require_known(body, CHAT)
    tokenizer = lm.require_tokenizer()
    variables = _variables(body, tokenizer)
    if not tokenizer.chat_templates:
        raise RequestError(
            "the model has no chat template, like most base models: send a prompt to "
            "/v1/completions instead",
            "messages",
        )
    try:
        ids = tokenizer.encode_chat(read_messages(body.get("messages")), **variables)
    except (ValueError, TypeError) as error:
        message = str(error).replace(tokenizer.name, "the model")  # the name is the server's path
        raise RequestError(message, "messages") from error
    maximum = _whole(body, "max_completion_tokens", None, 1, None)
    if maximum is None:
        maximum = _whole(body, "max_tokens", None, 1, None)
    wanted = _bool(body, "logprobs")
    top = _whole(body, "top_logprobs", 0, 0, CANDIDATES) or 0
    if top and not wanted:
        raise RequestError(
            f"top_logprobs is {top}, and logprobs is not true: set logprobs to true, or leave "
            "top_logprobs out",
            "top_logprobs",
        )
    return _shared(lm, body, [ids], max_new_tokens=maximum, logprobs=wanted, top=top)


def _variables(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Further variables of the chat template. Raises RequestError for those of the server."""
    key = "chat_template_kwargs"
    variables = _object(body, key)
    for name in ("messages", "self"):
        if name in variables:
            raise RequestError(f"{key} has {name!r}, which may not be among its keys", key)
    # A client may choose a template, but not bring a program, which could run for ever.
    if variables.get("chat_template") not in (None, *tokenizer.chat_templates):
        raise RequestError(
            f"chat_template of {key} is not the name of a template of the model", key
        )
    return variables


def _shared(
    lm: LanguageModel, body: Mapping[str, Any], prompts: list[list[int]], **found: Any
) -> Asked:
    options, stream = _object(body, "stream_options"), _bool(body, "stream")
    if body.get("stream_options") is not None and not stream:
        raise RequestError(
            "stream_options is given, and stream is not true: set stream to true, or leave "
            "stream_options out",
            "stream_options",
        )
    seed = _whole(body, "seed", None, 0, SEEDS - 1)
    return Asked(
        prompts=prompts,
        sampling=_sampling(body, lm),
        stop=_stop(body.get("stop")),
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
        choices=_whole(body, "n", 1, 1, MOST_CHOICES) or 1,
        stream=stream,
        with_usage=options.get("include_usage") is True,
        priority=_whole(body, "priority", 0, -(2**31), 2**31) or 0,
        **found,
    )


def _stop(stop: Any) -> list[str]:
    """The strings that end a text. Raises RequestError for anything else."""
    texts = [] if stop is None else stop if isinstance(stop, list) else [stop]
    for text in texts:
        if not isinstance(text, str):
            found = f"stop {'has' if text is not stop else 'is'} {json_text(text)}"
            raise RequestError(f"{found}: expected a text, or a list of texts", "stop")
        if not text:
            raise RequestError(
                "stop has an empty string, which would end every text: leave it out", "stop"
            )
    return texts


def _sampling(body: Mapping[str, Any], lm: LanguageModel) -> dict[str, Any]:
    """The model's own sampling with the fields that a body gives.

    Where the model's files say nothing, the temperature is OpenAI's 1.
    """
    least: dict[str, float | None] = {"temperature": 0, "repetition_penalty": 0}
    least |= dict.fromkeys(FILTERS)
    given = {name: _number(body, name, None, limit) for name, limit in least.items()}
    sampling: dict[str, Any] = {"temperature": 1.0} if lm.sampling is None else to_keys(lm.sampling)
    sampling.pop("do_sample", None)
    sampling |= {name: value for name, value in given.items() if value is not None}
    if not sampling.get("temperature"):  # filters of greedy rows are not looked at
        sampling = {"temperature": 0.0} | {
            name: value for name, value in sampling.items() if name == "repetition_penalty"
        }
    elif sampling.get("top_k") in (0, -1):  # as other servers switch it off
        sampling["top_k"] = None
    if least_new := _whole(body, "min_tokens", 0, 0, None):
        sampling["min_new_tokens"] = least_new
    if (ids := body.get("stop_token_ids")) is not None:
        sampling["stop_ids"] = _stop_ids(ids, lm.config.vocab_size)
    return sampling


def _stop_ids(ids: Any, vocabulary: int) -> list[int]:
    """Ids of a body. Raises RequestError for others than the model's, which could end nothing."""
    expected = f"expected a list of token ids from 0 to {vocabulary - 1}"
    if not isinstance(ids, list):
        raise RequestError(f"stop_token_ids is {json_text(ids)}: {expected}", "stop_token_ids")
    for one in ids:
        if type(one) is not int or not 0 <= one < vocabulary:
            raise RequestError(f"stop_token_ids has {json_text(one)}: {expected}", "stop_token_ids")
    return ids


def _require_known(body: Any, known: set[str]) -> None:
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    for key, value in body.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                message = f"{key} is {json_text(value, 60)}, and this server does not offer it"
                raise RequestError(message, key)
        elif key not in known | IGNORED:
            hint = did_you_mean(nearest(key, sorted(known)))
            raise RequestError(f"{key!r} is no key of this request{hint}", key)


def _object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; an empty one where it is missing or null."""
    if (found := body.get(key)) is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError(f"{key} is {json_text(found)}: expected an object", key)
    return found


def _bool(body: Mapping[str, Any], key: str) -> bool:
    """True or false; false where it is missing or null."""
    if (found := body.get(key)) is None:
        return False
    if not isinstance(found, bool):
        raise RequestError(f"{key} is {json_text(found)}: expected true or false", key)
    return found


def _whole(
    body: Mapping[str, Any], key: str, default: int | None, least: int, most: int | None
) -> int | None:
    """A whole number; the default where it is missing or null."""
    if (found := body.get(key)) is None:
        return default
    if type(found) is not int or found < least or (most is not None and found > most):
        limits = f"from {least} to {most}" if most is not None else f"of {least} or more"
        raise RequestError(f"{key} is {json_text(found)}: expected a whole number {limits}", key)
    return found


def _number(
    body: Mapping[str, Any], key: str, default: float | None, least: float | None
) -> float | None:
    if (found := body.get(key)) is None:
        return default
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or (least is not None and found < least):
        limit = "" if least is None else f" of {least:g} or more"
        raise RequestError(f"{key} is {json_text(found)}: expected a number{limit}", key)
    return found
