"""Checks of arguments, shared by several public functions."""

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


def most_new_tokens(maximum: Any, minimum: Any = None, *, least: int = 1) -> int:
    """The checked max_new_tokens, as a Python integer.

    minimum: min_new_tokens of a Sampling: a number, an array with one for each row, or None.
    least: 1, or 0 for requests that may generate nothing; then the minimum isn't checked.

    Raises ValueError unless least ≤ max_new_tokens and 0 ≤ min_new_tokens ≤ max_new_tokens; a
    traced minimum isn't checked.
    """
    maximum = _whole("max_new_tokens", maximum)
    if maximum < least:
        expected = "at least one new token" if least else "0 or more new tokens"
        raise ValueError(f"max_new_tokens is {maximum}: expected {expected}")
    if maximum and minimum is not None and not are_between(minimum, 0, maximum):
        raise ValueError(
            f"min_new_tokens is {minimum} and max_new_tokens {maximum}; "
            "expected 0 ≤ min_new_tokens ≤ max_new_tokens"
        )
    return maximum


def _whole(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("Python counts True as 1, but it is not a number of things")
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}: expected a whole number") from error


def compute_dtype(dtype: Any, precision: Precision | None) -> str | None:
    """The name of the requested compute dtype; None for the checkpoint's.

    dtype: bfloat16, float16 or float32, under any name of NumPy, JAX or PyTorch. Raises ValueError
    for other dtypes, and for bfloat16 or float16 with A32.
    """
    name = None if dtype is None else as_dtype("dtype", dtype, kind=np.generic).name
    if name not in (None, *COMPUTE_DTYPES):
        raise ValueError(f"dtype is {name}: expected one of {', '.join(COMPUTE_DTYPES)}")
    if precision is None or precision.bits == 16:
        return name
    if name not in (None, "float32"):
        raise ValueError(
            f"precision is {precision}, which is float32, and dtype is {name}: leave dtype out, or "
            "ask for A16"
        )
    return "float32"


def positive_whole(name: str, value: Any) -> int:
    """The value as a positive Python integer. Raises ValueError for other values."""
    if (number := _whole(name, value)) < 1:
        raise ValueError(f"{name} is {number}: expected a positive whole number")
    return number


def require_known_ids(sequences: Iterable[Sequence[int] | np.ndarray], vocabulary: int) -> None:
    """Raises ValueError for a token id outside the model's vocabulary.

    sequences: ids from the tokenizer, which are outside only if it is another model's.
    """
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
    """Raises ValueError unless documents is an iterable of strings.

    A single string is refused, since iterating over it gives characters. Items of an iterator
    aren't checked, since that would consume it.
    """
    if isinstance(documents, str):
        raise ValueError("documents is a text: pass a list, [text]")
    known = documents if isinstance(documents, Sequence) else ()
    if not _is_iterable(documents) or not all(isinstance(text, str) for text in known):
        raise ValueError(f"documents is {shown(documents)}: expected a list of texts")


def _is_iterable(value: Any) -> bool:
    """Whether a value can be iterated over; scalar arrays have __iter__, but can't."""
    is_scalar = isinstance(value, np.ndarray) and not value.ndim
    return isinstance(value, Iterable) and not isinstance(value, jax.Array) and not is_scalar


def stop_strings(stop: Any) -> list[str]:
    """Stop strings as a list, from one string, several, or None.

    Raises ValueError for an empty string and for values that aren't strings.
    """
    if stop is None:
        return []
    texts = list(stop) if _is_iterable(stop) and not isinstance(stop, str) else [stop]
    if others := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"stop has {shown(others[0])}: expected a string, or a list of strings")
    if "" in texts:
        raise ValueError("stop has an empty string, which would end every text: leave it out")
    return texts


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads a UTF-8 file, with its line endings unchanged.

    Raises ValueError with the file and the byte for other encodings.
    """
    return files.decode(Path(path).read_bytes(), str(path), ValueError)
