"""Reads and checks the header of a GGUF file: metadata and tensor descriptions.

A file consists of `GGUF`, a version, the numbers of tensors and of metadata entries, the entries, a
description of each tensor, and the tensors' bytes, aligned. Every count, length and offset is
checked against the file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpjax.checkpoint.gguf import blocks
from mpjax.checkpoint.safetensors import MAXIMUM_NUMBERS
from mpjax.errors import CheckpointError
from mpjax.kernels import files

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# More than any file has: a damaged header must not create unbounded Python objects.
MAXIMUM_ENTRIES, MAXIMUM_TENSORS, MAXIMUM_TEXTS = 2**16, 2**17, 2**22
MAXIMUM_KEY, MAXIMUM_DIMENSIONS, MAXIMUM_ALIGNMENT = 2**16, 4, 2**20
LEAST_ENTRY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes of an entry, and of a tensor
TEXT, ARRAY = 8, 9
# The dtypes of fixed-size value types, by number.
NUMBERS: Mapping[int, np.dtype] = {
    number: np.dtype(name)
    for number, name in {
        **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
        **{10: "<u8", 11: "<i8", 12: "<f8"},
    }.items()
}


class Tensor(NamedTuple):
    """A tensor of a file: type, shape [rows, columns], and bytes [begin, end).

    part: index of the file among the model's files.
    """

    name: str
    type: blocks.TensorType
    shape: tuple[int, ...]
    begin: int
    end: int
    part: int = 0


class Header(NamedTuple):
    """The header of a file.

    metadata: values by key: strings, numbers, booleans, lists of strings, and NumPy arrays.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is a regular file with GGUF's magic bytes or the suffix `.gguf`."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Reads a file's metadata and the descriptions of its tensors; no tensor is read.

    Raises CheckpointError for a truncated or inconsistent file, and for an unsupported version or
    tensor type.
    """
    with files.open_regular(path, CheckpointError) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(files.LONGEST_PREFIX)
        files.require_content(start, path, CheckpointError)
        if not start:
            raise CheckpointError(f"{path} is empty: fetch it again")
        if not start.startswith(MAGIC):
            raise CheckpointError(
                f"{path} is not a GGUF file: it begins with {start[:4]!r} instead of {MAGIC!r}"
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content, size).read()


class _Reader:
    """Reads a memory-mapped file from its beginning; `position` is the next byte."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self.path, self.content, self.size = path, content, size
        self.position = len(MAGIC)

    def read(self) -> Header:
        version = self.number(4, "its version")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has the GGUF version {version}: expected "
                f"{' or '.join(map(str, VERSIONS))} in little-endian order; convert the model again"
            )
        tensors = self.count(8, "tensors", LEAST_TENSOR, MAXIMUM_TENSORS)
        entries = self.count(8, "metadata entries", LEAST_ENTRY, MAXIMUM_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.key(metadata)
            metadata[key] = self.value(self.number(4, f"the type of {key!r}"), key)
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.key(described)
            described[name] = self.description(name)
        return Header(metadata, self.place(described, self.alignment(metadata)))

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. Raises CheckpointError if the file is shorter."""
        if count > self.size - self.position:
            raise CheckpointError(
                f"{self.path} ends inside {what}, at byte {self.position} of {self.size}: "
                "the file is damaged or an interrupted download; fetch it again"
            )
        self.position += count
        return self.content[self.position - count : self.position]

    def number(self, nbytes: int, what: str) -> int:
        return int.from_bytes(self.take(nbytes, what), "little")

    def count(self, nbytes: int, what: str, least_bytes: int, most: int) -> int:
        """Reads the number of following items of `least_bytes` bytes or more, and checks it."""
        count = self.number(nbytes, f"the number of {what}")
        if count > most or count * least_bytes > self.size - self.position:
            raise CheckpointError(
                f"{self.path} says that it has {count} {what}: expected at most "
                f"{min(most, (self.size - self.position) // least_bytes)}, by the file's size; "
                "it is damaged, so fetch it again"
            )
        return count

    def text(self, what: str) -> str:
        data = self.take(self.number(8, what), what)
        return files.decode(data, f"{what} in {self.path}", CheckpointError)

    def key(self, known: Mapping[str, Any]) -> str:
        """Reads a name, which must not be in `known`."""
        length = self.number(8, "a name")
        if length > MAXIMUM_KEY:
            raise CheckpointError(
                f"{self.path} has a name of {length} bytes at byte {self.position}: expected at "
                f"most {MAXIMUM_KEY}"
            )
        name = files.decode(self.take(length, "a name"), f"a name in {self.path}", CheckpointError)
        if name in known:
            raise CheckpointError(f"{self.path} names {name!r:.80} twice: it is damaged")
        return name

    def value(self, type: int, key: str) -> Any:
        if type == TEXT:
            return self.text(f"{key!r:.80}")
        if type == ARRAY:
            return self.array(self.number(4, f"the type of {key!r:.80}"), key)
        return self.numbers(type, 1, key)[0].item()

    def array(self, type: int, key: str) -> Any:
        least, most = (8, MAXIMUM_TEXTS) if type == TEXT else (1, self.size)
        length = self.count(8, f"values of {key!r:.80}", least, most)
        if type == TEXT:
            what = f"{key!r:.80}"  # formatted once: a vocabulary has over 100,000 strings
            return [self.text(what) for _ in range(length)]
        return self.numbers(type, length, key)

    def numbers(self, type: int, length: int, key: str) -> np.ndarray:
        dtype = NUMBERS.get(type)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: {key!r:.80} has values of the type {type}: expected a text, a "
                "number, a boolean, or a list of them"
            )
        data = self.take(length * dtype.itemsize, f"{key!r:.80}")
        return np.frombuffer(data, np.uint8 if dtype.kind == "b" else dtype).astype(dtype)

    def description(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Reads a tensor's shape, its type's number, and its offset from the first tensor."""
        what = f"the description of tensor {name!r:.80}"
        dimensions = self.number(4, what)
        if dimensions > MAXIMUM_DIMENSIONS:
            raise CheckpointError(
                f"tensor {name!r:.80} in {self.path} has {dimensions} dimensions: expected at most "
                f"{MAXIMUM_DIMENSIONS}"
            )
        # The file lists the contiguous dimension first.
        shape = tuple(self.number(8, what) for _ in range(dimensions))[::-1]
        if math.prod(max(length, 1) for length in shape) >= MAXIMUM_NUMBERS:
            raise CheckpointError(
                f"tensor {name!r:.80} in {self.path} has the shape {list(shape)}: expected a "
                "product below 2**59"
            )
        return shape, self.number(4, what), self.number(8, what)

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAXIMUM_ALIGNMENT or alignment % 8:
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r:.80}: expected a multiple of 8"
            )
        return alignment

    def place(
        self, described: Mapping[str, tuple[tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, Tensor]:
        """The tensors, checked to be inside the file and not to overlap."""
        start = -(-self.position // alignment) * alignment
        tensors = {}
        for name, (shape, number, offset) in described.items():
            where = f"tensor {name!r:.80} in {self.path}"
            kind = blocks.of_number(number, where)
            nbytes = kind.nbytes(shape, where)
            if offset % alignment:
                raise CheckpointError(
                    f"{where} has the offset {offset}: expected a multiple of {alignment}"
                )
            begin, end = start + offset, start + offset + nbytes
            if end > self.size:
                raise CheckpointError(
                    f"{where} ends at byte {end}, and the file has {self.size}: it is truncated, "
                    "likely an interrupted download, so fetch it again"
                )
            tensors[name] = Tensor(name, kind, shape, begin, end)
        _require_apart(tensors, self.path)
        return tensors


def _require_apart(tensors: Mapping[str, Tensor], path: Path) -> None:
    position, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < position:
            raise CheckpointError(
                f"tensors {previous!r:.80} and {tensor.name!r:.80} in {path} overlap by "
                f"{position - tensor.begin} bytes: the file is damaged"
            )
        position, previous = tensor.end, tensor.name
