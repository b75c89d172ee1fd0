"""Checks of what people pass that several functions share; each refusal is one sentence."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax.kernels import files
from mpjax.kernels.checks import are_between, as_dtype, shown
from mpjax.precision import Precision

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


def most_new_tokens(maximum: Any, minimum: Any = None) -> int:
    """max_new_tokens as a whole number.

    minimum: min_new_tokens of a Sampling: a number, one for each row, or None.

    Raises ValueError for other numbers, and for limits that no row can keep; a traced minimum is
    taken as it is.
    """
    maximum = _whole("max_new_tokens", maximum)
    if maximum < 1:
        raise ValueError(f"max_new_tokens is {maximum}; expected at least one new token")
    if minimum is not None and not are_between(minimum, 0, maximum):
        raise ValueError(
            f"min_new_tokens is {minimum} and max_new_tokens {maximum}; "
            "expected 0 ≤ min_new_tokens ≤ max_new_tokens"
        )
    return maximum


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a whole number") from error


def compute_dtype(dtype: Any, precision: Precision | None) -> str | None:
    """The name of the dtype that a model is to compute in; None for that of its checkpoint.

    Raises ValueError for a dtype that no model computes in, and for another than float32 beside
    a precision with A32.
    """
    name = None if dtype is None else as_dtype("dtype", dtype, kind=np.generic).name
    if name not in (None, *COMPUTE_DTYPES):
        raise ValueError(f"dtype is {name}: expected one of {', '.join(COMPUTE_DTYPES)}")
    if precision is None or precision.bits == 16:
        return name
    if name not in (None, "float32"):
        raise ValueError(
            f"precision is {precision}, of a model in float32, and dtype is {name}: leave dtype "
            "out, or ask for A16"
        )
    return "float32"


def positive_whole(name: str, value: Any) -> int:
    """A positive whole number as Python's. Raises ValueError for anything else."""
    if (number := _whole(name, value)) < 1:
        raise ValueError(f"{name} is {number}; it must be a positive whole number")
    return number


def require_known_ids(sequences: Iterable[Sequence[int] | np.ndarray], vocabulary: int) -> None:
    """Raises ValueError for an id, of those a tokenizer gave, that no embedding belongs to."""
    for ids in sequences:
        if not len(ids):
            continue
        smallest, largest = int(np.min(ids)), int(np.max(ids))
        if smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"the tokenizer gave token {smallest if smallest < 0 else largest}, and the model "
                f"knows 0 to {vocabulary - 1}: tokenizer.json and the weights are not from the "
                "same checkpoint"
            )


def require_documents(documents: Iterable[str]) -> None:
    """Raises ValueError for a text in the place of a list, and for what is no list of texts.

    A text would be read by characters. What comes one by one is not looked at before it is used.
    """
    if isinstance(documents, str):
        raise ValueError("documents is a text: pass a list, [text]")
    known = documents if isinstance(documents, Sequence) else ()
    if not _is_iterable(documents) or not all(isinstance(text, str) for text in known):
        raise ValueError(f"documents is {shown(documents)}: expected a list of texts")


def _is_iterable(value: Any) -> bool:
    """Whether there may be texts in it; a scalar array has the method, too."""
    return isinstance(value, Iterable) and not isinstance(value, jax.Array)


def stop_strings(stop: Any) -> list[str]:
    """The strings that end a text: of one, of several, or of None. ValueError for anything else."""
    if stop is None:
        return []
    texts = list(stop) if _is_iterable(stop) and not isinstance(stop, str) else [stop]
    if others := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"the stop string {shown(others[0])} is no text; expected some, or a list")
    if "" in texts:
        raise ValueError("an empty stop string would end every text before it begins")
    return texts


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, line ends as they are.

    Raises ValueError, naming the file and the byte, for another encoding.
    """
    return files.decode(Path(path).read_bytes(), str(path), ValueError)
