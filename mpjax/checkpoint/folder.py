"""HuggingFaceFolder: a source of config.json, safetensors files and tokenizer.json."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpjax.checkpoint import foreign
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.checkpoint.schemes import modelopt, registry
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.checkpoint.source import Source
from mpjax.checkpoint.text_model import text_config, text_tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import files
from mpjax.sampling import generation_config
from mpjax.sampling.settings import Sampling
from mpjax.text.tokenizer import Tokenizer
from mpjax.text.tokenizer_files import read_optional

CONFIG_NAME, TOKENIZER_NAME = "config.json", "tokenizer.json"
MODELOPT_NAME = "hf_quant_config.json"  # written by older ModelOpt versions


class HuggingFaceFolder(Source):
    """A folder with config.json, safetensors files and usually a tokenizer."""

    def read_config(self) -> dict[str, Any]:
        """The folder's config.json, or the text model's part of a multimodal one."""
        path = self.path / CONFIG_NAME
        if not os.path.lexists(path):
            raise CheckpointError(
                f"{self.path} has no {CONFIG_NAME}: expected a checkpoint folder"
                f"{foreign.describe(self.path)}"
            )
        config = files.read_object(path, CheckpointError)
        older = self.path / MODELOPT_NAME
        if config.get("quantization_config") is None and os.path.lexists(older):
            found = modelopt.from_older(files.read_object(older, CheckpointError))
            config = config if found is None else config | {"quantization_config": found}
        try:
            return text_config(config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}{os.sep}{error}") from error

    def open(self) -> Checkpoint:
        """The tensors of the safetensors headers, without the vision encoder's."""
        return text_tensors(Checkpoint.open(self.path))

    def read_policy(self, config: Mapping[str, Any]) -> Policy | None:
        """The policy of config.json's quantization_config."""
        written = config.get("quantization_config")
        if written is None:
            return None
        path = self.path / CONFIG_NAME
        if not isinstance(written, Mapping):
            raise CheckpointError(
                f"{path}: quantization_config is {written!r:.80}: expected an object"
            )
        try:
            return registry.read(written)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def read_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of tokenizer.json and related files; None without tokenizer.json."""
        has_one = os.path.lexists(self.path / TOKENIZER_NAME)
        return Tokenizer.from_folder(self.path) if has_one else None

    def read_sampling(self) -> Sampling | None:
        """The sampling settings of generation_config.json, or None."""
        path = self.path / generation_config.NAME
        return generation_config.read_sampling(read_optional(path), str(path))

    def file_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the named files that exist."""
        return sum(_bytes_of(self.path / name) for name in names)

    def copy_files(self, names: Iterable[str], folder: Path) -> None:
        """Copies the named files and folders that exist."""
        for name in names:
            if (path := self.path / name).is_dir():
                shutil.copytree(path, folder / name)
            elif path.is_file():
                shutil.copyfile(path, folder / name)


def _bytes_of(path: Path) -> int:
    if path.is_dir():
        return sum(_bytes_of(child) for child in path.iterdir())
    return path.stat().st_size if path.is_file() else 0
