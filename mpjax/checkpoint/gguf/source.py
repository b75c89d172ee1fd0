"""GGUFSource: presents a GGUF file as Hugging Face's files would describe the model."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf import architectures, delta, latent, sampling, vocabulary
from mpjax.checkpoint.gguf.header import Header, Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.mixtures import split_experts
from mpjax.checkpoint.gguf.parts import read_parts
from mpjax.checkpoint.gguf.renaming import GGUFCheckpoint, Renaming, info
from mpjax.checkpoint.gguf.rotary import FACTORS
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.checkpoint.schemes.compressed_tensors import LINEAR
from mpjax.checkpoint.schemes.gguf import SCHEME, GGUFReader
from mpjax.checkpoint.schemes.policy import Part, Policy
from mpjax.checkpoint.schemes.scheme import Rule
from mpjax.checkpoint.source import Source
from mpjax.errors import CheckpointError
from mpjax.sampling import generation_config
from mpjax.sampling.settings import Sampling
from mpjax.text.tokenizer import Tokenizer


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
        """The tensors of the header, split into experts.

        Layers that predict ahead are left out unless `mtp` asks for them, and in architectures
        whose head is not implemented.
        """
        # First, since it explains most about an unsupported file.
        architecture = architectures.of(self.metadata)
        drafts = self.mtp and architecture.delta is not None
        tensors = split_experts(self.header.tensors, self.path)
        return delta.read_layers(self.metadata, tensors, drafts=drafts)

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
            name: info(tensor, name, self.parts[1])
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
        architecture, files = architectures.of(self.metadata), self.parts[1]
        renaming = Renaming(self.path, files, architecture, self.read_config())
        pairs = latent.halves(self.tensors) if architecture.is_latent else {}
        halves = {half.name for pair in pairs.values() for half in pair}
        for tensor in self.tensors.values():
            if tensor.name not in FACTORS and tensor.name not in halves:
                renaming.add(tensor)
        for layer, pair in pairs.items():
            renaming.add_halves(layer, *pair)
        if architecture.numbers is not None:
            renaming.add_numbers(architecture.numbers(self.metadata))
        return renaming.checkpoint()

    def read_policy(self, config: Mapping[str, Any]) -> Policy | None:
        """A policy with the block type of each quantised module."""
        architecture = architectures.of(self.metadata)
        pairs = latent.halves(self.tensors) if architecture.is_latent else {}
        halves = {half.name for pair in pairs.values() for half in pair}  # which are dequantised
        types = {
            architecture.translate(tensor.name.rpartition(".")[0]): tensor.type.name
            for tensor in self.tensors.values()
            if tensor.type.dtype is None
            and tensor.name not in halves
            and not tensor.name.startswith(delta.DRAFT_JOINT)
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
