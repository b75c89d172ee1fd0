"""The keys of requests: which are obeyed, ignored and refused.

docs/serving.md contains these tables in Markdown (`rows`).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpjax.files.json_text import in_utf8, json_text
from mpjax.sampling.draw import TOP_LOGPROBS
from mpjax.sampling.random_keys import SEEDS
from mpjax.serve.constraints import RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from mpjax.serve.keys import (
    Key,
    Table,
    accepted,
    anything,
    flag,
    ignored,
    is_whole,
    number,
    record,
    refused,
    text,
    whole,
)

MOST_CHOICES = 128
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
PROMPT = "a text, token ids, or a list of them"


def _is_text(value: object) -> bool:
    # A model never generates a lone surrogate.
    return isinstance(value, str) and value != "" and value == in_utf8(value)


def _is_stop(value: object) -> bool:
    return _is_text(value) or _is_texts(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(is_whole, value))


def _is_bias(value: object) -> bool:
    def is_bias(one: object) -> bool:
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        return is_number and abs(one) <= 100  # type: ignore[arg-type]

    def is_id(key: str) -> bool:  # canonical: "01" would be a second key of 1
        return key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and len(key) < 10

    return isinstance(value, dict) and all(
        is_id(key) and is_bias(one) for key, one in value.items()
    )


STREAM_OPTIONS: Table = {"include_usage": flag(), "include_obfuscation": ignored()}

_BOTH: dict[str, Key] = {
    "model": text(),
    "max_tokens": whole(0),
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": whole(-1),
    "min_p": number(0),
    "repetition_penalty": number(0),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": accepted("an object of numbers from -100 to 100 by token id", _is_bias),
    "allowed_token_ids": accepted("a list of token ids", _is_ids),
    "bad_words": accepted("a list of texts that are not empty", _is_texts),
    "response_format": record("response_format", RESPONSE_FORMAT),
    "structured_outputs": record("structured_outputs", STRUCTURED_OUTPUTS),
    "min_tokens": whole(0).or_else(0),
    "n": whole(1, MOST_CHOICES).or_else(1),
    "seed": whole(SEEDS.start, SEEDS.stop - 1),
    "stop": accepted("a text that is not empty, or a list of such texts", _is_stop).or_else([]),
    "stop_token_ids": accepted("a list of token ids", _is_ids),
    "stream": flag(),
    "stream_options": record("stream_options", STREAM_OPTIONS),
    "priority": whole(-(2**31), 2**31).or_else(0),
    # Keys about the client, the service, or the speed of answers.
    "metadata": ignored(),
    "prediction": ignored(),
    "prompt_cache_key": ignored(),
    "prompt_cache_options": ignored(),
    "prompt_cache_retention": ignored(),
    "safety_identifier": ignored(),
    "service_tier": ignored(),
    "store": ignored(),
    "user": ignored(),
    # Keys that change an answer.
    "audio": refused(),
    "function_call": refused("none", "auto"),
    "functions": refused([]),
    "modalities": refused(["text"]),
    "moderation": refused(),
    "suffix": refused(""),
    "verbosity": refused("medium"),
    "web_search_options": refused(),
    # Keys of other OpenAI-compatible servers; clients send them with those servers' defaults.
    "add_generation_prompt": refused(True),
    "continue_final_message": refused(False),
    "ignore_eos": refused(False),
    "include_stop_str_in_output": refused(False),
    "length_penalty": refused(1),
    "skip_special_tokens": refused(True),
    "spaces_between_special_tokens": refused(True),
    "use_beam_search": refused(False),
}

COMPLETION: Table = _BOTH | {
    "prompt": anything(PROMPT).or_else(""),
    "max_tokens": whole(0).or_else(16),
    "echo": flag(),
    "logprobs": whole(0, TOP_LOGPROBS),
    "best_of": whole(1, MOST_CHOICES),
    "reasoning_effort": refused("medium"),
    "parallel_tool_calls": ignored(),
    "tool_choice": refused("none", "auto"),
    "tools": refused([]),
}

CHAT: Table = _BOTH | {
    "messages": anything("a list of messages"),
    "max_tokens": whole(1),
    "max_completion_tokens": whole(1),
    "logprobs": flag(),
    "top_logprobs": whole(0, TOP_LOGPROBS).or_else(0),
    "chat_template_kwargs": accepted("an object", lambda v: isinstance(v, dict)).or_else({}),
    "reasoning_effort": accepted(
        f"one of {', '.join(map(json_text, EFFORTS))}", lambda value: value in EFFORTS
    ),
    "tools": accepted("a list of functions", lambda v: isinstance(v, list)).or_else([]),
    "tool_choice": anything(
        '"none", "auto", "required" or an object with the function to call'
    ).or_else("auto"),
    "parallel_tool_calls": flag().or_else(True),
    "echo": refused(False),
    "best_of": refused(1),
}

_ALIKE = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"),
    *("stream", "priority", "metadata", "prompt_cache_key", "prompt_cache_options", "user"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "moderation"),
)
REASONING: Table = {
    "effort": CHAT["reasoning_effort"],
    "summary": ignored(),
    "generate_summary": ignored(),
    "context": ignored(),
}
TEXT: Table = {
    "format": accepted("an object with a type", lambda value: isinstance(value, dict)),
    "verbosity": _BOTH["verbosity"],
}

RESPONSE: Table = {name: CHAT[name] for name in _ALIKE} | {
    "input": anything("a text, or a list of items"),
    "instructions": text(),
    "tools": CHAT["tools"],
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "max_output_tokens": CHAT["max_completion_tokens"],
    "reasoning": record("reasoning", REASONING),
    "text": record("text", TEXT),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "client_metadata": ignored(),
    "include": ignored("message.output_text.logprobs"),
    "stream_options": ignored(),
    "access_programs": refused(),
    "background": refused(False),
    "background_options": refused(),
    "context_management": refused(),
    "conversation": refused(),
    "image": refused(),
    "max_tool_calls": refused(),
    "previous_response_id": refused(),
    "prompt": refused(),
    "top_logprobs": refused(0),
    "truncation": refused("disabled"),
}

TOKENIZE: Table = {
    "model": text(),
    "prompt": text(),
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_special_tokens": accepted("true or false", lambda value: isinstance(value, bool)),
    "add_generation_prompt": flag().or_else(True),
    "return_token_strs": flag(),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "continue_final_message": refused(False),
    "chat_template": refused(),
}
_NAME = accepted("a text that is not empty", _is_text)
LOAD_ADAPTER: Table = {
    "lora_name": _NAME,
    "lora_path": _NAME,
    "load_inplace": flag(),
    "base_model_name": ignored(),
}
UNLOAD_ADAPTER: Table = {"lora_name": _NAME, "lora_int_id": ignored()}
DETOKENIZE: Table = {"model": text(), "tokens": _BOTH["stop_token_ids"]}

TABLES = {"completions": COMPLETION, "chats": CHAT, "responses": RESPONSE}


def rows() -> Iterator[str]:
    """The Markdown lines of all tables; keys with the same cells share a line."""
    names: dict[tuple[str, str, str, str], list[str]] = {}
    for name in {**COMPLETION, **CHAT, **RESPONSE}:
        for where, key in _places(name):
            default = "" if key.default in (None, [], {}) else json_text(key.default)
            cells = (where, key.effect, key.expected, default)
            names.setdefault(cells, []).append(f"`{name}`")
    yield "| keys | of | | accepted values | default |"
    yield "| --- | --- | --- | --- | --- |"
    for effect in ("obeyed", "ignored", "refused"):
        for cells, alike in names.items():
            if cells[1] == effect:
                yield f"| {' | '.join([', '.join(alike), *cells])} |"


def _places(name: str) -> list[tuple[str, Key]]:
    """The distinct entries of a key, each with the names of the endpoints that share it."""
    found: dict[int, list[str]] = {}
    for where, table in TABLES.items():
        if (key := table.get(name)) is not None:
            found.setdefault(id(key), []).append(where)
    keys = {id(table[name]): table[name] for table in TABLES.values() if name in table}
    every = len(TABLES)
    return [
        ("all" if len(where) == every else ", ".join(where), keys[key])
        for key, where in found.items()
    ]
