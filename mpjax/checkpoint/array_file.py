"""Writes and reads a safetensors file array by array, with a checksum of each array.

Host memory holds one array at a time. A checksum is the CRC-32 of an array's bytes, as `zlib` and
`gzip` compute it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax.checkpoint.safetensors import DTYPES, LENGTH_BYTES, TensorInfo
from mpjax.errors import CheckpointError

# Bytes per read or write. Between chunks, progress is shown and Ctrl-C takes effect.
CHUNK_BYTES = 16 << 20
# Bytes to write between two calls of fsync. An fsync can't be interrupted, so it must stay short.
SYNC_BYTES = 256 << 20
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Advance = Callable[[int], None]


def file_bytes(arrays: Mapping[str, Any]) -> int:
    """Bytes of the file that `write` makes of arrays; ShapeDtypeStructs suffice."""
    return len(header(in_order(arrays))) + sum(nbytes(array) for array in arrays.values())


def nbytes(array: Any) -> int:
    """Bytes of an array or a ShapeDtypeStruct."""
    return array.size * array.dtype.itemsize


def write(file: Path, arrays: Mapping[str, jax.Array], advance: Advance) -> dict[str, int]:
    """Writes arrays to a new file and returns their checksums by name.

    advance: called after each chunk with the number of bytes written. Raises OSError, such as
    FileExistsError if the file exists.
    """
    arrays = in_order(arrays)
    checksums, waiting = {}, 0
    with file.open("xb") as stream:
        stream.write(header(arrays))
        for name, array in arrays.items():
            checksum = 0
            for piece in pieces(array):
                stream.write(piece)
                checksum = zlib.crc32(piece, checksum)
                advance(piece.nbytes)
                waiting += piece.nbytes
                if waiting >= SYNC_BYTES:
                    stream.flush()
                    os.fsync(stream.fileno())
                    waiting = 0
            checksums[name] = checksum
    return checksums


def read(info: TensorInfo, checksum: int | None, advance: Advance) -> np.ndarray:
    """Reads one array.

    checksum: the expected CRC-32, or None for no check. advance: called after each chunk with the
    number of bytes read. Raises CheckpointError for an unreadable file and a wrong checksum.
    """
    found, content = 0, np.empty(info.nbytes, np.uint8)
    try:
        with info.file.open("rb", buffering=0) as stream:
            stream.seek(info.begin)
            for piece in _chunks(content):
                _read_into(piece, stream, info)
                if checksum is not None:
                    found = zlib.crc32(piece, found)
                advance(piece.nbytes)
    except OSError as error:
        raise CheckpointError(f"{info.name} in {info.file} can't be read: {error}") from error
    if checksum is not None and found != checksum:
        raise CheckpointError(
            f"{info.name} in {info.file} has other bytes than were saved (checksum {found:08x}, "
            f"expected {checksum:08x}): copy the saved model again, or convert the original "
            "checkpoint again"
        )
    return content.view(info.dtype).reshape(info.shape)


def in_order(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Sorts arrays by itemsize, widest first, so that each begins at a multiple of its itemsize."""
    return dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))


def header(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors header of a file with these arrays; ShapeDtypeStructs suffice."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": {**metadata}}
    begin = 0
    for name, array in arrays.items():
        end = begin + nbytes(array)
        dtype = DTYPE_NAMES[np.dtype(array.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def pieces(array: Any) -> Iterator[memoryview]:
    """The bytes of an array, CHUNK_BYTES at a time."""
    return _chunks(_to_host(array))


def checksum(array: Any) -> int:
    """The CRC-32 of an array's bytes."""
    found = 0
    for piece in pieces(array):
        found = zlib.crc32(piece, found)
    return found


def _to_host(array: Any) -> np.ndarray:
    """The bytes of an array, uint8 [bytes]."""
    if isinstance(array, jax.Array) and array.is_fully_replicated:
        # JAX caches the host copy in the array object. Use a temporary object, so that the copy is
        # freed with it and doesn't stay in the caller's array.
        array = array.addressable_data(0)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _chunks(content: np.ndarray) -> Iterator[memoryview]:
    """The memory of an array uint8 [bytes], in pieces of at most CHUNK_BYTES."""
    for begin in range(0, content.size, CHUNK_BYTES):
        yield content.data[begin : begin + CHUNK_BYTES]


def _read_into(view: memoryview, stream: Any, info: TensorInfo) -> None:
    """Fills `view` from a stream that may return fewer bytes per call than requested."""
    while view:
        count = stream.readinto(view)
        if not count:
            raise CheckpointError(
                f"{info.file} has become shorter while {info.name} was read from it: copy the "
                "saved model again"
            )
        view = view[count:]
