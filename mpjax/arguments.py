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


def new_token_limits(minimum: Any, maximum: Any) -> tuple[Any, int]:
    """min_new_tokens and max_new_tokens as whole numbers; a traced minimum stays as it is.

    Raises ValueError for other numbers, and for limits that no row can keep.
    """
    maximum = _whole("max_new_tokens", maximum)
    traced = isinstance(minimum, jax.core.Tracer)
    minimum = minimum if traced else _whole("min_new_tokens", minimum)
    if maximum < 1 or (not traced and not 0 <= minimum <= maximum):
        raise ValueError(
            f"min_new_tokens is {minimum} and max_new_tokens {maximum}; "
            "expected 0 ≤ min_new_tokens ≤ max_new_tokens and at least one new token"
        )
    return minimum, maximum


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a whole number") from error


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
    """Raises ValueError for a text in the place of a list, which would be read by characters."""
    if isinstance(documents, str):
        raise ValueError("documents is a text: pass a list, [text]")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, line ends as they are.

    Raises ValueError, naming the file and the byte, for another encoding.
    """
    return files.decode(Path(path).read_bytes(), str(path), ValueError)
