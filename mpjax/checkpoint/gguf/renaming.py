"""Presents the tensors of a GGUF file under Hugging Face's names, with their values and shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf import latent
from mpjax.checkpoint.gguf.architecture import Architecture, Change
from mpjax.checkpoint.gguf.delta import DRAFT_JOINT
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.errors import CheckpointError

# Ends of the names of arrays that have more axes in Hugging Face's files → the number of axes of
# size 1 before and after the array's.
AXES = {"moe_statics.e_score_correction_bias": (1, 0), "self_attn.A_log": (2, 1)}
Join = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file under Hugging Face's names.

    A quantised tensor has its type as the suffix, as in `model.norm.q8_0`, and is uint8 [rows,
    blocks, bytes of a block].

    changes: by name, the conversions that `read` applies: of values, of row order, or a selection
    of rows. sources: by name, what to read instead of the tensor's own bytes: two tensors whose
    rows are concatenated, a tensor of which `changes` selects some rows, or what `joins` takes.
    joins: by name, the function from the sources' arrays to the tensor.
    """

    changes: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, tuple[TensorInfo, ...]] = dataclasses.field(default_factory=dict)
    joins: Mapping[str, Join] = dataclasses.field(default_factory=dict)

    def read(self, name: str) -> np.ndarray:
        """One tensor, converted to Hugging Face's values and order; see Checkpoint.read."""
        if (sources := self.sources.get(name)) is None:
            read = [super().read(name)]
        else:
            read = [Checkpoint(self.folder, {name: source}).read(name) for source in sources]
        try:
            array = self.joins.get(name, _concatenate)(read)
            return array if (change := self.changes.get(name)) is None else change(array)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Renaming:
    """Collects tensors by Hugging Face's names.

    path, files: of the model, and its parts. config: the model's config.json. The other fields are
    those of a GGUFCheckpoint.
    """

    path: Path
    files: Sequence[Path]
    architecture: Architecture
    config: Mapping[str, Any]
    tensors: dict[str, TensorInfo] = dataclasses.field(default_factory=dict)
    changes: dict[str, Change] = dataclasses.field(default_factory=dict)
    sources: dict[str, tuple[TensorInfo, ...]] = dataclasses.field(default_factory=dict)
    joins: dict[str, Join] = dataclasses.field(default_factory=dict)

    def checkpoint(self) -> GGUFCheckpoint:
        """All tensors that have been added."""
        tensors = types.MappingProxyType(self.tensors)
        return GGUFCheckpoint(self.path, tensors, self.changes, self.sources, self.joins)

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor. Raises CheckpointError if its name is taken."""
        architecture = self.architecture
        module, _, suffix = tensor.name.rpartition(".")
        suffix = suffix if tensor.type.dtype is not None else tensor.type.name.lower()
        own = architecture.array(tensor.name)
        name = own or f"{architecture.translate(module)}.{suffix}"
        found = info(tensor, name, self.files)
        for end, (before, after) in AXES.items():
            if own is not None and own.endswith(end):
                shape = (*[1] * before, math.prod(found.shape), *[1] * after)
                found = dataclasses.replace(found, shape=shape)
        if name in self.tensors:
            self._add_second(tensor, name, found)
            return
        self.tensors[name] = found
        if module == DRAFT_JOINT and tensor.type.dtype is None:
            self._add_dequantized(tensor, name, found)
            return
        change = architecture.change(tensor.name if own else module, self.config)
        if change is not None:
            self.changes[name] = change
        if "ffn_down_exps" in module and self._is_turned(found):
            self.tensors[name] = dataclasses.replace(found, shape=found.shape[::-1])
            self.sources[name], self.changes[name] = (found,), np.transpose
        if architecture.delta == "joint" and module.endswith(("ssm_beta", "ssm_alpha")):
            self.sources[name] = (found,)
            rows, *rest = found.shape
            self.tensors[name] = dataclasses.replace(found, shape=(rows // 2, *rest))

    def _add_second(self, tensor: Tensor, name: str, found: TensorInfo) -> None:
        """Joins gate and up, of which one has been added. Raises CheckpointError for others."""
        if not self.architecture.joins or len(self.sources.get(name, ())) == 2:
            raise CheckpointError(
                f"{self.path}: {tensor.name} is the second tensor for {name} of Hugging Face's "
                "files: expected one"
            )
        pair = found, self.tensors[name]
        self.sources[name] = pair if "ffn_gate" in tensor.name else pair[::-1]
        joint = _joined(*pair)
        if self.architecture.turns and ".experts." in name:
            turned, alternate = self._is_turned(found), self.architecture.alternates
            self.joins[name] = functools.partial(_gate_up, alternate=alternate, turned=turned)
            joint = dataclasses.replace(joint, shape=joint.shape[:: -1 if turned else 1])
        self.tensors[name] = joint

    def _add_dequantized(self, tensor: Tensor, name: str, found: TensorInfo) -> None:
        """Puts the numbers of a matrix of blocks in the place of its blocks."""
        del self.tensors[name]
        name = f"{name.rpartition('.')[0]}.weight"
        number = np.dtype(np.float32)
        wide = dataclasses.replace(found, name=name, dtype=number, shape=tensor.shape)
        self.tensors[name], self.sources[name] = wide, (found,)
        self.joins[name] = functools.partial(latent.dequantized, kind=tensor.type)

    def _is_turned(self, found: TensorInfo) -> bool:
        """Whether Hugging Face's file has an expert's plain weight transposed."""
        return self.architecture.turns and len(found.shape) == 2

    def add_halves(self, layer: str, keys: Tensor, values: Tensor) -> None:
        """Adds the joint map of latents of a layer, such as `blk.3`."""
        name = f"model.layers.{layer.removeprefix('blk.')}.{latent.JOINT}"
        read = tuple(info(half, name, self.files) for half in (keys, values))
        joint = dataclasses.replace(
            read[0], dtype=np.dtype(np.float32), end=read[0].end + read[1].nbytes
        )
        self.tensors[name] = dataclasses.replace(joint, shape=latent.joint_shape(keys, values))
        self.sources[name] = read
        self.joins[name] = functools.partial(latent.join, kinds=(keys.type, values.type))

    def add_numbers(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Adds arrays of the metadata, by Hugging Face's names."""
        for name, array in numbers.items():
            own = TensorInfo(name, array.dtype, array.shape, self.path, 0, array.nbytes)
            self.tensors[name], self.sources[name] = own, ()
            self.joins[name] = functools.partial(_held, array)


def info(tensor: Tensor, name: str, files: Sequence[Path]) -> TensorInfo:
    """The TensorInfo of a tensor; blocks are uint8. files: the model's files."""
    kind, shape, dtype = tensor.type, tensor.shape, tensor.type.dtype
    if dtype is None:
        dtype = np.dtype(np.uint8)
        shape = (*shape[:-1], shape[-1] // kind.size, kind.block_bytes)
    return TensorInfo(name, dtype, shape, files[tensor.part], tensor.begin, tensor.end)


def _gate_up(halves: Sequence[np.ndarray], alternate: bool, turned: bool) -> np.ndarray:
    """Gate's and up's rows in turn, or one after the other; transposed."""
    rows = np.stack(halves, axis=int(alternate)).reshape(-1, *halves[0].shape[1:])
    return rows.T if turned else rows


def _held(array: np.ndarray, read: Sequence[np.ndarray]) -> np.ndarray:
    return array


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined(first: TensorInfo, second: TensorInfo) -> TensorInfo:
    """Concatenates two tensors along rows; only shape and size in bytes are meaningful."""
    (rows, *rest), more = first.shape, second.shape[0]
    end = first.end + second.nbytes
    return dataclasses.replace(first, shape=(rows + more, *rest), end=end)
