"""GGUFSource: presents a GGUF file as Hugging Face's files would describe the model."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf import architectures, delta, latent, sampling, vocabulary
from mpjax.checkpoint.gguf.architecture import Change
from mpjax.checkpoint.gguf.header import Header, Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.mixtures import split_experts
from mpjax.checkpoint.gguf.parts import read_parts
from mpjax.checkpoint.gguf.rotary import FACTORS
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes.compressed_tensors import LINEAR
from mpjax.checkpoint.schemes.gguf import SCHEME, GGUFReader
from mpjax.checkpoint.schemes.policy import Part, Policy
from mpjax.checkpoint.schemes.scheme import Rule
from mpjax.checkpoint.source import Source
from mpjax.errors import CheckpointError
from mpjax.sampling import generation_config
from mpjax.sampling.settings import Sampling
from mpjax.text.tokenizer import Tokenizer

# Ends of the names of arrays that have one row in Hugging Face's files.
WITH_A_ROW = "moe_statics.e_score_correction_bias"
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
class GGUFSource(Source):
    """A GGUF file, or a split one, of which `path` is any part."""

    @functools.cached_property
    def parts(self) -> tuple[Header, list[Path]]:
        """The joint header of the model's files, and the files; read once."""
        return read_parts(self.path)

    @property
    def header(self) -> Header:
        """The header."""
        return self.parts[0]

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the header, split into experts, without layers that predict ahead."""
        architectures.of(self.metadata)  # first, since it explains most about an unsupported file
        tensors = split_experts(self.header.tensors, self.path)
        return delta.without_drafts(self.metadata, tensors)

    @property
    def metadata(self) -> Metadata:
        """The metadata in the header."""
        return Metadata(self.path, self.header.metadata)

    def read_config(self) -> dict[str, Any]:
        """The config.json equivalent to the metadata."""
        config = architectures.read_config(self.metadata, self.tensors, self._factors())
        return config | {"eos_token_id": vocabulary.read_stop_ids(self.metadata) or None}

    def _factors(self) -> dict[str, np.ndarray]:
        """The file's divisors of rotary frequencies, by tensor name."""
        infos = {
            name: _info(tensor, name, self.parts[1])
            for name, tensor in self.header.tensors.items()
            if name in FACTORS
        }
        for name in infos:
            if (kind := self.header.tensors[name].type).dtype is None:
                raise CheckpointError(f"{self.path}: {name} is {kind.name}: expected F32 or F16")
        held = Checkpoint(self.path, infos)
        return {name: held.read(name).astype(np.float32).reshape(-1) for name in infos}

    def open(self) -> GGUFCheckpoint:
        """The tensors of the header. Raises CheckpointError for duplicate names."""
        architecture, config = architectures.of(self.metadata), self.read_config()
        tensors: dict[str, TensorInfo] = {}
        changes: dict[str, Change] = {}
        sources: dict[str, tuple[TensorInfo, ...]] = {}
        pairs = latent.halves(self.tensors) if architecture.is_latent else {}
        halves = {half.name for pair in pairs.values() for half in pair}
        for tensor in self.tensors.values():
            if tensor.name in FACTORS or tensor.name in halves:  # of config.json, or joined below
                continue
            module, _, suffix = tensor.name.rpartition(".")
            suffix = suffix if tensor.type.dtype is not None else tensor.type.name.lower()
            own = architecture.array(tensor.name)
            name = own or f"{architecture.translate(module)}.{suffix}"
            info = _info(tensor, name, self.parts[1])
            if own is not None and own.endswith(WITH_A_ROW):
                info = dataclasses.replace(info, shape=(1, math.prod(info.shape)))
            if name in tensors and architecture.joins and len(sources.get(name, ())) < 2:
                pair = info, tensors[name]
                sources[name] = pair if "ffn_gate" in module else pair[::-1]
                tensors[name] = _joined(*pair)
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{self.path}: {tensor.name} is the second tensor for {name} of Hugging Face's "
                    "files: expected one"
                )
            tensors[name] = info
            if (change := architecture.change(tensor.name if own else module, config)) is not None:
                changes[name] = change
            if architecture.delta == "joint" and module.endswith(("ssm_beta", "ssm_alpha")):
                sources[name] = (info,)
                rows, *rest = info.shape
                tensors[name] = dataclasses.replace(info, shape=(rows // 2, *rest))
        joins = self._join_halves(pairs, tensors, sources)
        if architecture.numbers is not None:
            joins |= self._add_numbers(architecture.numbers(self.metadata), tensors, sources)
        return GGUFCheckpoint(self.path, types.MappingProxyType(tensors), changes, sources, joins)

    def _join_halves(
        self,
        pairs: Mapping[str, tuple[Tensor, Tensor]],
        tensors: dict[str, TensorInfo],
        sources: dict[str, tuple[TensorInfo, ...]],
    ) -> dict[str, Join]:
        """Adds the joint maps of latents to `tensors` and `sources`; how each is joined."""
        joins: dict[str, Join] = {}
        for layer, (keys, values) in pairs.items():
            name = f"model.layers.{layer.removeprefix('blk.')}.{latent.JOINT}"
            read = tuple(_info(half, name, self.parts[1]) for half in (keys, values))
            joint = dataclasses.replace(
                read[0], dtype=np.dtype(np.float32), end=read[0].end + read[1].nbytes
            )
            tensors[name] = dataclasses.replace(joint, shape=latent.joint_shape(keys, values))
            sources[name] = read
            joins[name] = functools.partial(latent.join, kinds=(keys.type, values.type))
        return joins

    def _add_numbers(
        self,
        numbers: Mapping[str, np.ndarray],
        tensors: dict[str, TensorInfo],
        sources: dict[str, tuple[TensorInfo, ...]],
    ) -> dict[str, Join]:
        """Adds arrays of the metadata to `tensors` and `sources`; how each is read."""
        for name, array in numbers.items():
            tensors[name] = TensorInfo(name, array.dtype, array.shape, self.path, 0, array.nbytes)
            sources[name] = ()
        return {name: functools.partial(_held, array) for name, array in numbers.items()}

    def read_policy(self, config: Mapping[str, Any]) -> Policy | None:
        """A policy with the block type of each quantised module."""
        architecture = architectures.of(self.metadata)
        pairs = latent.halves(self.tensors) if architecture.is_latent else {}
        halves = {half.name for pair in pairs.values() for half in pair}  # which are dequantised
        types = {
            architecture.translate(tensor.name.rpartition(".")[0]): tensor.type.name
            for tensor in self.tensors.values()
            if tensor.type.dtype is None and tensor.name not in halves
        }
        heads = {}
        if architecture.delta == "tiled":
            own = delta.Heads.of(config)
            heads = {name: own for name in types if name.endswith("linear_attn.out_proj")}
        reader = GGUFReader(types, heads=heads)
        return Policy("gguf", (Part(SCHEME, (Rule((LINEAR,), reader),)),))

    def read_tokenizer(self) -> Tokenizer:
        """The tokenizer of the metadata, built once."""
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return vocabulary.read_tokenizer(self.metadata)

    def read_sampling(self) -> Sampling | None:
        """The sampling settings of the metadata, or None."""
        return sampling.read_sampling(self.metadata)

    def file_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the files that `copy_files` writes."""
        return sum(len(text.encode()) for text in self._texts(names).values())

    def copy_files(self, names: Iterable[str], folder: Path) -> None:
        """Writes the equivalent Hugging Face files: config.json and the tokenizer's."""
        for name, text in self._texts(names).items():
            (folder / name).write_text(text, encoding="utf-8")

    def _texts(self, names: Iterable[str]) -> dict[str, str]:
        wanted = set(names)
        texts = self.read_tokenizer().to_files()
        if (own := self.read_sampling()) is not None:
            name = generation_config.NAME
            keys = json.loads(texts.get(name, "{}")) | generation_config.to_keys(own)
            texts[name] = json.dumps(keys)
        texts["config.json"] = json.dumps(self.read_config(), indent=2)
        return {name: text for name, text in texts.items() if name in wanted}


def _held(array: np.ndarray, read: Sequence[np.ndarray]) -> np.ndarray:
    return array


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined(first: TensorInfo, second: TensorInfo) -> TensorInfo:
    """Concatenates two tensors along rows; only shape and size in bytes are meaningful."""
    (rows, *rest), more = first.shape, second.shape[0]
    end = first.end + second.nbytes
    return dataclasses.replace(first, shape=(rows + more, *rest), end=end)


def _info(tensor: Tensor, name: str, files: Sequence[Path]) -> TensorInfo:
    """A TensorInfo of a tensor; blocks are uint8. files: the model's files."""
    kind, shape, dtype = tensor.type, tensor.shape, tensor.type.dtype
    if dtype is None:
        dtype = np.dtype(np.uint8)
        shape = (*shape[:-1], shape[-1] // kind.size, kind.block_bytes)
    return TensorInfo(name, dtype, shape, files[tensor.part], tensor.begin, tensor.end)
