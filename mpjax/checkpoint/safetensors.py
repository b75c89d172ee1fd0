"""Reads safetensors checkpoints: `open` reads headers, `read` memory-maps one tensor.

Source: https://github.com/huggingface/safetensors, section "Format". A file is an 8-byte
little-endian header length, a JSON header, and the tensors' bytes without holes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import mmap
import os
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpjax.checkpoint import foreign
from mpjax.errors import CheckpointError
from mpjax.kernels import files

INDEX_NAME = "model.safetensors.index.json"
LENGTH_BYTES = 8
# The format's own limit; a larger number means that the file is something else.
MAXIMUM_HEADER_BYTES = 100_000_000
# NumPy's limits: dimensions of an array, and numbers in one (dimensions of 0 counted as 1).
MAXIMUM_DIMENSIONS, MAXIMUM_NUMBERS = 64, 2**59
SHOWN_NAMES = 5

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor's dtype, shape, and bytes [begin, end) in `file`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder, by name; their bytes stay on disk until `read`."""

    folder: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Reads and checks the headers of a folder's safetensors files; tensors stay on disk.

        Takes `model.safetensors`, else the shards of `model.safetensors.index.json`, else the only
        `*.safetensors` file. A tensor in another shard than the index says is left out, with a
        warning. Raises CheckpointError for a file that is missing or damaged, and for a shard that
        lacks a tensor that the index puts in it.
        """
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a folder: expected a folder of safetensors files")
        if os.path.lexists(root / "model.safetensors"):
            tensors = read_header(root / "model.safetensors")
        elif os.path.lexists(root / INDEX_NAME):
            tensors = _read_shards(root / INDEX_NAME)
        else:
            tensors = read_header(_only_safetensors_file(root))
        return cls(root, types.MappingProxyType(tensors))

    def renamed(self, parts: Mapping[str, str]) -> Checkpoint:
        """The checkpoint with parts of its tensors' names replaced: found → new."""
        tensors = {}
        for name, info in self.tensors.items():
            for found, new in parts.items():
                name = name.replace(found, new)
            tensors[name] = dataclasses.replace(info, name=name)
        return dataclasses.replace(self, tensors=types.MappingProxyType(tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """Memory-maps one tensor as a read-only array.

        Every call makes its own mapping, which is released with the array, so reading tensor by
        tensor never holds more than one in host memory. Raises CheckpointError for a name that the
        checkpoint lacks, with the nearest name.
        """
        info = self.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(name, self.tensors, n=1)
            hint = f"; the nearest name is {close[0]!r}" if close else ""
            raise CheckpointError(f"{self.folder} has no tensor {name!r}{hint}")
        if info.nbytes == 0:  # an empty range can't be mapped
            empty = np.empty(info.shape, info.dtype)
            empty.flags.writeable = False
            return empty
        page_offset = info.begin % mmap.ALLOCATIONGRANULARITY
        with files.open_regular(info.file, CheckpointError) as stream:
            if os.fstat(stream.fileno()).st_size < info.end:
                raise CheckpointError(
                    f"{info.file} became shorter while it was read: load it again"
                )
            mapping = mmap.mmap(
                stream.fileno(),
                page_offset + info.nbytes,
                access=mmap.ACCESS_READ,
                offset=info.begin - page_offset,
            )
        count = math.prod(info.shape)
        return np.frombuffer(mapping, info.dtype, count, page_offset).reshape(info.shape)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Reads and checks one safetensors file's header, without touching the tensors' bytes.

    Raises CheckpointError when the file is truncated, not safetensors, or inconsistent.
    """
    with files.open_regular(file, CheckpointError) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(files.LONGEST_PREFIX)
        files.require_content(start, file, CheckpointError)
        if len(start) < LENGTH_BYTES:
            raise CheckpointError(
                f"{file} has {size} bytes: a safetensors file begins with 8 bytes of header "
                "length, so this is likely an interrupted download; fetch it again"
            )
        header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
        if header_bytes > MAXIMUM_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file: its first 8 bytes give a header of "
                f"{header_bytes} bytes, and at most {MAXIMUM_HEADER_BYTES} are allowed; fetch the "
                "file again"
            )
        if LENGTH_BYTES + header_bytes > size:
            raise CheckpointError(
                f"{file} ends inside its header: expected at least {LENGTH_BYTES + header_bytes} "
                f"bytes, found {size}; likely an interrupted download, so fetch it again"
            )
        stream.seek(LENGTH_BYTES)
        data = stream.read(header_bytes)
    source = f"the header of {file}"
    text = files.decode(data, source, CheckpointError)
    header = files.parse_object(text, source, CheckpointError, unique=True)
    _check_metadata(header.pop("__metadata__", None), file)
    data_begin = LENGTH_BYTES + header_bytes
    tensors = {name: _parse_entry(name, e, file, data_begin) for name, e in header.items()}
    _check_layout(tensors, file, data_begin, size)
    return tensors


def _check_metadata(metadata: Any, file: Path) -> None:
    if metadata is None:  # null is allowed
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"__metadata__ in the header of {file} is {metadata!r:.80}: expected a map of strings"
        )


def _is_sizes(value: Any) -> bool:
    """Whether a JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _is_shape(value: Any) -> bool:
    """Whether a JSON value is the shape of an array that numpy can hold."""
    if not _is_sizes(value) or len(value) > MAXIMUM_DIMENSIONS:
        return False
    return math.prod(max(size, 1) for size in value) < MAXIMUM_NUMBERS


def _parse_entry(name: str, entry: Any, file: Path, data_begin: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(
            f"tensor {name!r} in {file} is described by {entry!r:.80}: "
            "expected dtype, shape and data_offsets"
        )
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} in {file} has the dtype {entry['dtype']!r:.80}: "
            f"expected one of {', '.join(DTYPES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_shape(shape):
        raise CheckpointError(
            f"tensor {name!r} in {file} has the shape {shape!r:.80}: "
            f"expected at most {MAXIMUM_DIMENSIONS} non-negative integers of a product below 2**59"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"tensor {name!r} in {file} has the data_offsets {offsets!r:.80}: "
            "expected [begin, end] with 0 <= begin <= end"
        )
    begin, end = offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(
            f"tensor {name!r} in {file} spans {end - begin} bytes: {entry['dtype']} of shape "
            f"{shape} needs {math.prod(shape) * dtype.itemsize}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _check_layout(tensors: dict[str, TensorInfo], file: Path, data_begin: int, size: int) -> None:
    """Checks that tensors cover every byte from the header's end to the file's end exactly once."""
    position, previous = data_begin, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin < position:
            raise CheckpointError(
                f"tensors {previous} and {info.name!r} in {file} overlap by "
                f"{position - info.begin} bytes"
            )
        if info.begin > position:
            raise CheckpointError(
                f"{file} has a hole of {info.begin - position} bytes between {previous} and "
                f"tensor {info.name!r}: the format allows none"
            )
        position, previous = info.end, repr(info.name)
    if size < position:
        raise CheckpointError(
            f"{file} is truncated: expected {position} bytes, found {size}; "
            "likely an interrupted download, so fetch it again"
        )
    if size > position:
        raise CheckpointError(
            f"{file} has {size - position} bytes after its last tensor: expected {position} bytes, "
            f"found {size}"
        )


def _read_shards(index: Path) -> dict[str, TensorInfo]:
    """The tensors of all shards, each from the shard that the index names."""
    weight_map = _read_index(index)
    tensors, others = {}, []
    for shard in sorted(set(weight_map.values())):
        for name, info in read_header(index.parent / shard).items():
            if weight_map.get(name) == shard:
                tensors[name] = info
            else:
                others.append(f"{name!r} in {shard}")
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{index} says that tensor {name!r} is in {shard}, which lacks it: "
                "the index and the shards are of different checkpoints, so fetch both again"
            )
    if others:
        warnings.warn(
            f"{index} does not name {len(others)} of the shards' tensors, which are left out: "
            f"{_some(others)}",
            stacklevel=3,
        )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    """Reads the shard's file name for each tensor, and checks that every shard exists."""
    weight_map = files.read_object(file, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map: expected a map from tensors to shards")
    for name, shard in weight_map.items():
        # A path to another folder is refused: a downloaded index must not choose files to open.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(
                f"{file} puts tensor {name!r} in {shard!r:.80}: expected the name of a file beside "
                "it"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.lexists(file.parent / shard)]
    if missing:
        raise CheckpointError(
            f"{file} names {len(shards)} shards, of which {len(missing)} are missing: "
            f"{_some(missing)}; fetch them into the same folder"
        )
    return weight_map


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def _only_safetensors_file(folder: Path) -> Path:
    """The only safetensors file of a folder without model.safetensors and without an index."""
    # macOS writes metadata of other files into files whose names begin with a dot.
    found = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("."))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files ({_some([f.name for f in found])}) and "
            f"neither model.safetensors nor {INDEX_NAME} to say which belong together: fetch the "
            "index too"
        )
    raise CheckpointError(f"{folder} has no *.safetensors file{foreign.describe(folder)}")
