"""What can be continued: texts, token ids and chats, one of them or a batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
TokenIds = Sequence[int] | np.ndarray | jax.Array
Prompt = str | TokenIds | Messages
# A two-dimensional array is a batch, too.
Prompts = Prompt | Sequence[Prompt]

EXPECTED = "a text, token ids, or the messages of one chat"


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a batch; what is neither counts as a batch."""
    if _is_array(prompts):
        return prompts.ndim == 1
    if isinstance(prompts, str):
        return True
    return (
        _is_sequence(prompts)
        and len(prompts) > 0
        and (isinstance(prompts[0], Mapping) or _as_id(prompts[0]) is not None)
    )


def encode(
    tokenizer: Tokenizer, prompts: Prompts, vocabulary: int, chat_template: str | None = None
) -> list[list[int]]:
    """The token ids of each prompt; ids stay as they are, without a bos token in front.

    vocabulary: what ids are below. chat_template: for chats, as Tokenizer.chat takes it.

    Raises ValueError for what is no prompt, a prompt without tokens, ids that the model doesn't
    know, and a chat template without a chat.
    """
    batch: Sequence[Any] = [prompts] if is_single(prompts) else _require_batch(prompts)
    batch = [np.asarray(prompt) if _is_array(prompt) else prompt for prompt in batch]
    kinds = [_kind(index, prompt) for index, prompt in enumerate(batch)]
    if chat_template is not None and "chat" not in kinds:
        raise ValueError(
            "chat_template is for chats, and no prompt is one: pass lists of messages, such as "
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
                    f"prompt {index} has token {wrong[0]}, and the model knows 0 to "
                    f"{vocabulary - 1}"
                )
        if not ids:
            raise ValueError(
                f"prompt {index} is empty: it has no tokens, and a model continues at least one"
            )
        encoded.append(ids)
    return encoded


def _require_batch(prompts: Any) -> Sequence[Any]:
    if _is_array(prompts) and prompts.ndim > 0:
        prompts = list(np.asarray(prompts))
    if not _is_sequence(prompts):
        raise ValueError(
            f"prompts are {_describe(prompts)}; expected {EXPECTED}, or a list of such prompts (a "
            "single message is a list, too)"
        )
    if not prompts:
        raise ValueError("there are no prompts; pass a text, or a list of texts")
    return prompts


def _kind(index: int, prompt: Any) -> str:
    """`text`, `chat` or `ids`."""
    if isinstance(prompt, str):
        return "text"
    if _is_array(prompt) and prompt.ndim == 1 and jnp.issubdtype(prompt.dtype, jnp.integer):
        return "ids"
    if _is_sequence(prompt):
        if all(_as_id(item) is not None for item in prompt):
            return "ids"
        if all(isinstance(item, Mapping) for item in prompt):
            return "chat"
    raise ValueError(f"prompt {index} is {_describe(prompt)}; expected {EXPECTED}")


def _is_sequence(value: Any) -> bool:
    # Bytes are numbers, too, but nobody means them as token ids.
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _as_id(value: Any) -> int | None:
    """A whole number as Python's; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _describe(value: Any) -> str:
    if _is_array(value):
        return f"an array of {value.dtype} {list(value.shape)}"
    return f"{value!r:.60}" if _is_sequence(value) else f"a {type(value).__name__}"
