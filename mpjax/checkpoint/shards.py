"""Writes safetensors files for Hugging Face libraries: one file, or shards with an index.

Shapes and dtypes are given first; then tensors are written one by one, in any order. Host memory
holds one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from mpjax.checkpoint import array_file
from mpjax.checkpoint.safetensors import INDEX_NAME

SHARD_BYTES = 5_000_000_000
METADATA = {"format": "pt"}  # required by transformers: names and layouts are PyTorch's

Write = Callable[[str, jax.Array, Callable[[int], None]], None]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file. tensors: by name, in file order; shapes and dtypes suffice."""

    name: str
    tensors: Mapping[str, Any]

    @property
    def header(self) -> bytes:
        """The bytes of the file's header."""
        return array_file.header(self.tensors, METADATA)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(map(array_file.nbytes, self.tensors.values()))


def divide(tensors: Mapping[str, Any], limit: int | None = None) -> list[Shard]:
    """Divides tensors into files of at most `limit` bytes each, or one larger tensor.

    limit: SHARD_BYTES by default.
    """
    limit = SHARD_BYTES if limit is None else limit
    parts: list[dict[str, Any]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = array_file.nbytes(tensor)
        if size > room and parts[-1]:
            parts.append({})
            room = limit
        parts[-1][name] = tensor
        room -= size
    if len(parts) == 1:
        return [Shard("model.safetensors", array_file.in_order(parts[0]))]
    return [
        Shard(
            f"model-{number:05}-of-{len(parts):05}.safetensors",
            array_file.in_order(part),
        )
        for number, part in enumerate(parts, 1)
    ]


def index(shards: Sequence[Shard]) -> str:
    """The JSON of the index: tensor name → file."""
    total = sum(array_file.nbytes(each) for shard in shards for each in shard.tensors.values())
    places = {name: shard.name for shard in shards for name in shard.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)


@contextlib.contextmanager
def writing(folder: Path, shards: Sequence[Shard]) -> Iterator[Write]:
    """Creates the files (and the index); yields a function that writes one tensor.

    Its arguments are the tensor's name, the array, and a function that is called with the number of
    bytes written. Raises ValueError at the end of the block if a tensor is missing.
    """
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(index(shards), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int, Any]] = {}
        for shard in shards:
            stream = stack.enter_context((folder / shard.name).open("xb"))
            stream.write(shard.header)
            begin = stream.tell()
            for name, tensor in shard.tensors.items():
                places[name] = stream, begin, tensor
                begin += array_file.nbytes(tensor)
        written: set[str] = set()
        waiting = 0

        def write(name: str, array: jax.Array, advance: Callable[[int], None]) -> None:
            nonlocal waiting
            stream, begin, planned = places[name]
            if (array.shape, array.dtype) != (planned.shape, planned.dtype):
                raise ValueError(f"{name} is {array.dtype} {array.shape}: it was planned otherwise")
            stream.seek(begin)
            for piece in array_file.pieces(array):
                stream.write(piece)
                advance(piece.nbytes)
                waiting += piece.nbytes
                if waiting >= array_file.SYNC_BYTES:
                    stream.flush()
                    os.fsync(stream.fileno())
                    waiting = 0
            written.add(name)

        yield write
        if missing := places.keys() - written:
            raise ValueError(f"{len(missing)} tensors were not written, such as {min(missing)}")
