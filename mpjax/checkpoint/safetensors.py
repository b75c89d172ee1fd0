"""Reads safetensors checkpoints: headers when opened, one tensor's bytes when asked.

Source: https://github.com/huggingface/safetensors, section "Format". A file is an 8-byte
little-endian header length, a JSON header, and the tensors' bytes without holes.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import mmap
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpjax.checkpoint.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
LENGTH_BYTES = 8
# The format's own limit; a larger number means that the file is something else.
MAXIMUM_HEADER_BYTES = 100_000_000
GIT_LFS_PREFIX = b"version https://git-lfs"

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
    """Where a tensor lies: bytes [begin, end) of `file`, counted from the start of the file."""

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
        """Reads and checks the headers of a folder's safetensors files, and nothing else of them.

        Takes `model.safetensors`, else the shards of `model.safetensors.index.json`, else the one
        other `*.safetensors` file. Raises CheckpointError where a file is missing or damaged, or
        where shards, index and headers disagree.
        """
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a folder: expected a folder of safetensors files")
        weight_map: dict[str, str] = {}
        if (root / "model.safetensors").is_file():
            files = [root / "model.safetensors"]
        elif (root / INDEX_NAME).is_file():
            weight_map = _read_index(root / INDEX_NAME)
            files = [root / shard for shard in sorted(set(weight_map.values()))]
        else:
            files = [_only_safetensors_file(root)]
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(file).items():
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {tensors[name].file.name} and {file.name} of "
                        f"{root}: expected it in one shard"
                    )
                tensors[name] = info
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                raise CheckpointError(
                    f"{root / INDEX_NAME} says that tensor {name!r} is in {shard}, which lacks it: "
                    "the index and the shards are of different checkpoints, so fetch both again"
                )
        return cls(root, types.MappingProxyType(tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """Maps one tensor's bytes into memory as a read-only array of its shape and dtype.

        Every call makes a mapping of its own, which goes with the array: reading a checkpoint
        tensor by tensor never holds more than one of them in host memory. Raises CheckpointError
        when there is no such tensor.
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
        with info.file.open("rb") as stream:
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
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(GIT_LFS_PREFIX))
        if start == GIT_LFS_PREFIX:
            raise _git_lfs_error(file)
        if len(start) < LENGTH_BYTES:
            raise CheckpointError(
                f"{file} has {size} bytes: a safetensors file begins with 8 bytes of header "
                "length, so this is likely an interrupted download; fetch it again"
            )
        header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
        if header_bytes > MAXIMUM_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file: its first 8 bytes give a header of "
                f"{header_bytes} bytes, and at most {MAXIMUM_HEADER_BYTES} are allowed"
            )
        if LENGTH_BYTES + header_bytes > size:
            raise CheckpointError(
                f"{file} ends inside its header: expected at least {LENGTH_BYTES + header_bytes} "
                f"bytes, found {size}; likely an interrupted download, so fetch it again"
            )
        stream.seek(LENGTH_BYTES)
        text = stream.read(header_bytes)
    header = _parse_object(text, f"the header of {file}")
    _check_metadata(header.pop("__metadata__", {}), file)
    data_begin = LENGTH_BYTES + header_bytes
    tensors = {name: _parse_entry(name, e, file, data_begin) for name, e in header.items()}
    _check_layout(tensors, file, data_begin, size)
    return tensors


def _git_lfs_error(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
    )


def _parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object, in which no key may be repeated."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{source} names {repeated!r} twice")
        return dict(pairs)

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} is a JSON {type(value).__name__}: expected an object")
    return value


def _check_metadata(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"__metadata__ in the header of {file} is not a map of strings")


def _is_sizes(value: Any) -> bool:
    """Whether a JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _parse_entry(name: str, entry: Any, file: Path, data_begin: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(
            f"tensor {name!r} in {file} is described by {entry!r}: "
            "expected dtype, shape and data_offsets"
        )
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} in {file} has the dtype {entry['dtype']!r}: "
            f"expected one of {', '.join(DTYPES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape):
        raise CheckpointError(
            f"tensor {name!r} in {file} has the shape {shape!r}: "
            "expected a list of non-negative integers"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"tensor {name!r} in {file} has the data_offsets {offsets!r}: "
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
    """Checks that the tensors fill the file from the header's end to the file's, each byte once."""
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


def _read_index(file: Path) -> dict[str, str]:
    """Reads which shard holds each tensor, and checks that every shard is there."""
    text = file.read_bytes()
    if text.startswith(GIT_LFS_PREFIX):
        raise _git_lfs_error(file)
    weight_map = _parse_object(text, str(file)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map: expected a map from tensors to shards")
    for name, shard in weight_map.items():
        # A shard elsewhere than in the checkpoint's own folder is nothing that a hub writes.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{file} puts tensor {name!r} in {shard!r}: expected the name of a file beside it"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (file.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{file} names {len(shards)} shards, of which {len(missing)} are missing: "
            f"{', '.join(missing)}; fetch them into the same folder"
        )
    return weight_map


def _only_safetensors_file(folder: Path) -> Path:
    """The one safetensors file of a folder that has neither of the usual names."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files ({', '.join(f.name for f in files)}) and "
            f"neither model.safetensors nor {INDEX_NAME} to say which belong together: fetch the "
            "index too"
        )
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has PyTorch *.bin files and no *.safetensors: convert them to safetensors"
        )
    if any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} has GGUF files, which are not read, and no *.safetensors: take the "
            "safetensors checkpoint that they were made from"
        )
    raise CheckpointError(f"{folder} has no *.safetensors file")
