"""The keys of completions and chat completions: which are obeyed, ignored and refused.

docs/serving.md has these tables for readers, as `rows` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpjax.engine.state import CANDIDATES
from mpjax.json_text import in_utf8, json_text
from mpjax.random_keys import SEEDS
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
PROMPT = "a text, token ids, or a list of them"


def _is_text(value: object) -> bool:
    # Half of a surrogate pair is in no text that a model gives.
    return isinstance(value, str) and value != "" and value == in_utf8(value)


def _is_stop(value: object) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


STREAM_OPTIONS: Table = {"include_usage": flag(), "include_obfuscation": ignored()}

_BOTH: dict[str, Key] = {
    "model": text(),
    "max_tokens": whole(0),
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": whole(-1),
    "min_p": number(0),
    "repetition_penalty": number(0),
    "min_tokens": whole(0).or_else(0),
    "n": whole(1, MOST_CHOICES).or_else(1),
    "seed": whole(SEEDS.start, SEEDS.stop - 1),
    "stop": accepted("a text that is not empty, or a list of such texts", _is_stop).or_else([]),
    "stop_token_ids": accepted(
        "a list of token ids", lambda found: isinstance(found, list) and all(map(is_whole, found))
    ),
    "stream": flag(),
    "stream_options": record("stream_options", STREAM_OPTIONS),
    "priority": whole(-(2**31), 2**31).or_else(0),
    # They are about the client, the service, or how fast an answer comes.
    "metadata": ignored(),
    "parallel_tool_calls": ignored(),
    "prediction": ignored(),
    "prompt_cache_key": ignored(),
    "prompt_cache_options": ignored(),
    "prompt_cache_retention": ignored(),
    "safety_identifier": ignored(),
    "service_tier": ignored(),
    "store": ignored(),
    "user": ignored(),
    # They change an answer.
    "audio": refused(),
    "frequency_penalty": refused(0),
    "function_call": refused("none", "auto"),
    "functions": refused([]),
    "logit_bias": refused({}),
    "modalities": refused(["text"]),
    "moderation": refused(),
    "presence_penalty": refused(0),
    "response_format": refused({"type": "text"}),
    "suffix": refused(""),
    "tool_choice": refused("none", "auto"),
    "tools": refused([]),
    "verbosity": refused("medium"),
    "web_search_options": refused(),
    # Keys of other servers of the protocol, which clients send with the values of these servers.
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
    "logprobs": whole(0, CANDIDATES),
    "best_of": whole(1, MOST_CHOICES),
    "reasoning_effort": refused("medium"),
}

CHAT: Table = _BOTH | {
    "messages": anything("a list of messages"),
    "max_tokens": whole(1),
    "max_completion_tokens": whole(1),
    "logprobs": flag(),
    "top_logprobs": whole(0, CANDIDATES).or_else(0),
    "chat_template_kwargs": accepted("an object", lambda v: isinstance(v, dict)).or_else({}),
    "reasoning_effort": text(),
    "echo": refused(False),
    "best_of": refused(1),
}


def rows() -> Iterator[str]:
    """The lines of both tables in Markdown; keys that are alike share a line."""
    names: dict[tuple[str, str, str, str], list[str]] = {}
    for name in {**COMPLETION, **CHAT}:
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
    """The requests that have a key, in words, and the key there."""
    completion, chat = COMPLETION.get(name), CHAT.get(name)
    if completion is chat and completion is not None:
        return [("both", completion)]
    found = (("completions", completion), ("chats", chat))
    return [(where, key) for where, key in found if key is not None]
