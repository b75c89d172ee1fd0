"""GGUF files with hostile headers, drawn from a seed: changed bytes, and values of other kinds."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tests.mpjax.checkpoint.gguf.write_gguf import (
    MIXED,
    TYPES,
    gguf,
    llama_metadata,
    random_tensors,
    with_experts,
)

# What programs stumble over in the place of a count, a length, an offset or a type.
SMALL = (0, 1, 2, 3, 4, 7, 8, 9, 12, 31, 255)
LARGE = (2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**59, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "llama", "gemma3", "\0", "{{", "{% for %}", "é" * 99, "</s>", "gpt2", "linear", "yarn")
FLOATS = (0.0, -1.0, 1e-30, 3e38, float("inf"), float("nan"))
LISTS: tuple[list[Any], ...] = ([], [0] * 9, [-1, 2**31 - 1], [0.5, float("nan")], ["", "a", "a"])
FIRST = 4  # the magic stays, or nothing behind it is read


class Hostile:
    """Draws files: half of them have changed bytes in the header, half changed values.

    is_mixture: whether the sound file is one of a mixture of experts.
    """

    def __init__(self, seed: int, *, is_mixture: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.metadata, self.tensors = llama_metadata(), random_tensors(MIXED, self.rng)
        if is_mixture:
            with_experts(self.metadata, self.tensors, self.rng, kind="Q8_0")
        self.sound = gguf(self.metadata, self.tensors)
        self.header = len(self.sound) - sum(len(content) for *_, content in self.tensors.values())

    def draw(self) -> bytes:
        """One file; one in eight is cut as well."""
        data = self._with_values() if self._below(2) else self.sound
        if data is self.sound or self._below(4) == 0:
            data = self._with_bytes(data)
        return data[: FIRST + self._below(len(data) - FIRST)] if self._below(8) == 0 else data

    def _below(self, end: int) -> int:
        return int(self.rng.integers(end))

    def _with_values(self) -> bytes:
        metadata, tensors = dict(self.metadata), dict(self.tensors)
        for _ in range(1 + self._below(3)):
            key = list(metadata)[self._below(len(metadata))]
            metadata[key] = self._value()
        if self._below(3) == 0:
            name = list(tensors)[self._below(len(tensors))]
            _, shape, content = tensors.pop(name)
            kind = list(TYPES)[self._below(len(TYPES))]
            if self._below(2):
                shape = tuple(self._below(200) for _ in range(self._below(6)))
            if self._below(4):
                tensors[name if self._below(2) else self._text()] = kind, shape, content
        return gguf(metadata, tensors, (32, 32, 32, 8, 64)[self._below(5)])

    def _value(self) -> Any:
        numbers = [n for n in (*SMALL, *LARGE) if n < 2**32]
        some = (numbers, TEXTS, FLOATS, LISTS, (True, False))[self._below(5)]
        return some[self._below(len(some))]

    def _text(self) -> str:
        return TEXTS[self._below(len(TEXTS))]

    def _with_bytes(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(1 + self._below(4)):
            place, length = FIRST + self._below(self.header - FIRST), 1 + self._below(8)
            way = self._below(6)
            if way == 0:
                changed[place] ^= 1 << self._below(8)
            elif way == 1:
                del changed[place : place + 4 * length]
            elif way == 2:
                changed[place:place] = changed[place : place + 8 * length]
            else:
                written = self.rng.bytes(length) if way == 3 else self._number()
                changed[place : place + (0 if way == 4 else len(written))] = written
        return bytes(changed)

    def _number(self) -> bytes:
        numbers = (*SMALL, *LARGE)
        return struct.pack("<Q", numbers[self._below(len(numbers))])[: (4, 8)[self._below(2)]]
