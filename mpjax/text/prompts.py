"""Encodes prompts (texts, token ids or chats), single or in a batch, to token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
TokenIds = Sequence[int] | np.ndarray | jax.Array
Prompt = str | TokenIds | Messages
# An array [batch, tokens] is a batch too.
Prompts = Prompt | Sequence[Prompt]

EXPECTED = "a text, token ids, or the messages of one chat"


def is_single(prompts: Any) -> bool:
    """Whether the argument is one prompt; any other value counts as a batch."""
    if _is_array(prompts):
        return prompts.ndim == 1
    if isinstance(prompts, str):
        return True
    return (
        _is_sequence(prompts)
        and len(prompts) > 0
        and (isinstance(prompts[0], Mapping) or _as_id(prompts[0]) is not None)
    )


def has_text(prompts: Prompts) -> bool:
    """Whether any prompt is a text or a chat. Raises ValueError for anything but prompts."""
    _, kinds = _read(prompts)
    return set(kinds) != {"ids"}


def encode(
    tokenizer: Tokenizer, prompts: Prompts, vocabulary: int, chat_template: str | None = None
) -> list[list[int]]:
    """Token ids of each prompt; prompts of ids are unchanged, and get no bos token.

    vocabulary: the model's number of token ids. chat_template: for chats, as for Tokenizer.chat.

    Raises ValueError for anything but prompts, a prompt without tokens, ids outside the vocabulary,
    and a chat template without a chat.
    """
    batch, kinds = _read(prompts)
    if chat_template is not None and "chat" not in kinds:
        raise ValueError(
            "chat_template is given, and no prompt is a chat: pass lists of messages, such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    encoded = []
    for index, (kind, prompt) in enumerate(zip(kinds, batch, strict=True)):
        if kind == "text":
            ids = tokenizer.encode(prompt)
        elif kind == "chat":
            ids = tokenizer.encode_chat(prompt, chat_template=chat_template)
        else:
            ids = [operator.index(i) for i in prompt]
            if wrong := [i for i in ids if not 0 <= i < vocabulary]:
                raise ValueError(
                    f"prompt {index} has the token id {wrong[0]}: expected 0 to {vocabulary - 1}, "
                    "the model's vocabulary"
                )
        if not ids:
            raise ValueError(f"prompt {index} is empty: expected at least one token")
        encoded.append(ids)
    return encoded


def _read(prompts: Prompts) -> tuple[list[Any], list[str]]:
    """The prompts of a batch, and their kinds. Raises ValueError for anything but prompts."""
    batch: Sequence[Any] = [prompts] if is_single(prompts) else _require_batch(prompts)
    batch = [np.asarray(prompt) if _is_array(prompt) else prompt for prompt in batch]
    return batch, [_kind(index, prompt) for index, prompt in enumerate(batch)]


def _require_batch(prompts: Any) -> Sequence[Any]:
    if _is_array(prompts) and prompts.ndim > 0:
        prompts = list(np.asarray(prompts))
    if not _is_sequence(prompts):
        raise ValueError(
            f"prompts are {_describe(prompts)}: expected {EXPECTED}, or a list of such prompts (a "
            "chat of a single message is a list too)"
        )
    if not prompts:
        raise ValueError("prompts are empty: pass a text, or a list of texts")
    return prompts


def _kind(index: int, prompt: Any) -> str:
    """The kind of a prompt: `text`, `chat` or `ids`. Raises ValueError for anything else."""
    if isinstance(prompt, str):
        return "text"
    if _is_array(prompt) and prompt.ndim == 1 and jnp.issubdtype(prompt.dtype, jnp.integer):
        return "ids"
    if _is_sequence(prompt):
        if all(_as_id(item) is not None for item in prompt):
            return "ids"
        if all(isinstance(item, Mapping) for item in prompt):
            return "chat"
    raise ValueError(f"prompt {index} is {_describe(prompt)}: expected {EXPECTED}")


def _is_sequence(value: Any) -> bool:
    # Bytes are sequences of integers too, but are never meant as token ids.
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _as_id(value: Any) -> int | None:
    """An integer of any integer type as a Python int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _describe(value: Any) -> str:
    if _is_array(value):
        return f"an array of {value.dtype} {list(value.shape)}"
    return f"{value!r:.60}" if _is_sequence(value) else f"a {type(value).__name__}"
