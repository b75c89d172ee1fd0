"""Source: the interface of a checkpoint on disk, independent of its files' format.

A source provides the keys of config.json, the tensors with Hugging Face's names, the policy of
quantised modules, and the tokenizer. `locate.py` chooses the source at a path.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.sampling.settings import Sampling
from mpjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """A checkpoint on disk. Every method raises CheckpointError for unreadable files.

    family: the family to load it as, instead of that of its architecture; or None.
    mtp: whether to load its multi-token-prediction head, too.
    """

    path: Path
    family: str | None = dataclasses.field(default=None, kw_only=True)
    mtp: bool = dataclasses.field(default=False, kw_only=True)

    @abc.abstractmethod
    def read_config(self) -> dict[str, Any]:
        """The keys of config.json."""

    @abc.abstractmethod
    def open(self) -> Checkpoint:
        """The tensors, by Hugging Face's names; their bytes stay on disk."""

    @abc.abstractmethod
    def read_policy(self, config: Mapping[str, Any]) -> Policy | None:
        """The policy of the quantised modules; None without a quantization config."""

    @abc.abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None."""

    @abc.abstractmethod
    def read_sampling(self) -> Sampling | None:
        """The checkpoint's sampling settings, or None."""

    @abc.abstractmethod
    def file_bytes(self, names: Iterable[str]) -> int:
        """Bytes that `copy_files` writes."""

    @abc.abstractmethod
    def copy_files(self, names: Iterable[str], folder: Path) -> None:
        """Writes the files in `names` (config, tokenizer, …) that this source has into `folder`."""
