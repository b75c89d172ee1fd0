"""Typed access to a GGUF file's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpjax.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata of a file. Every method returns its default if the key is missing.

    Without a default, a missing key is a CheckpointError, as is a value of another type.

    taken: the keys that were read.
    """

    path: Path
    values: Mapping[str, Any]
    taken: set[str] = dataclasses.field(default_factory=set, compare=False)

    def _get(self, key: str, expected: str, default: Any) -> Any:
        self.taken.add(key)
        if key in self.values:
            return self.values[key]
        if default is ...:
            raise CheckpointError(f"{self.path} has no {key!r}: expected {expected}")
        return default

    def _refuse(self, key: str, value: Any, expected: str) -> CheckpointError:
        shown = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else value
        shown = repr(value) if isinstance(value, str) else shown
        return CheckpointError(f"{self.path}: {key!r} is {shown!s:.80}: expected {expected}")

    def text(self, key: str, default: Any = ...) -> Any:
        """The string at a key."""
        value = self._get(key, "a text", default)
        if value is not default and not isinstance(value, str):
            raise self._refuse(key, value, "a text")
        return value

    def whole(self, key: str, default: Any = ...) -> Any:
        """The integer at a key."""
        value = self._get(key, "a whole number", default)
        if value is not default and type(value) is not int:
            raise self._refuse(key, value, "a whole number")
        return value

    def each(self, key: str, count: int, default: Any = ...) -> list[int]:
        """The integers of `count` layers at a key, or a list of one integer for all layers."""
        if not isinstance(self.values.get(key), np.ndarray):
            return [self.whole(key, default)]
        found = self.numbers(key, length=count)
        if not np.issubdtype(found.dtype, np.integer):
            raise self._refuse(key, found, "whole numbers")
        return [int(number) for number in found]

    def number(self, key: str, default: Any = ...) -> Any:
        """The number at a key, with a float32's shortest digits: 1e-05, not 9.99999975e-06."""
        value = self._get(key, "a number", default)
        if value is default:
            return value
        if type(value) not in (int, float) or not np.isfinite(value):
            raise self._refuse(key, value, "a finite number")
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return float(str(narrow)) if float(narrow) == value else value

    def flag(self, key: str, default: Any = ...) -> Any:
        """The bool at a key."""
        value = self._get(key, "true or false", default)
        if value is not default and type(value) is not bool:
            raise self._refuse(key, value, "true or false")
        return value

    def texts(self, key: str, default: Any = ...) -> Any:
        """A list of strings."""
        value = self._get(key, "a list of texts", default)
        if value is not default and not isinstance(value, list):
            raise self._refuse(key, value, "a list of texts")
        return value

    def numbers(self, key: str, default: Any = ..., length: int | None = None) -> Any:
        """An array of numbers. length: its expected length, or None."""
        expected = "a list of numbers" if length is None else f"a list of {length} numbers"
        value = self._get(key, expected, default)
        if value is default:
            return value
        if not isinstance(value, np.ndarray) or length not in (None, len(value)):
            raise self._refuse(key, value, expected)
        return value
