"""The interface of a checkpoint on disk, whatever its files are.

A source gives the keys of config.json, the tensors by Hugging Face's names, the policy of the
quantised ones, and the tokenizer. `locate.py` chooses the source at a path.
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
    """A checkpoint on disk. Every method raises CheckpointError for what can't be read.

    family: the name of the family that it is taken for, instead of that of its architecture.
    """

    path: Path
    family: str | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def read_config(self) -> dict[str, Any]:
        """The keys of config.json."""

    @abc.abstractmethod
    def open(self) -> Checkpoint:
        """The tensors, by Hugging Face's names; their bytes stay on disk."""

    @abc.abstractmethod
    def read_policy(self, config: Mapping[str, Any]) -> Policy | None:
        """The policy of the quantised modules; None where config.json names none."""

    @abc.abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is none."""

    @abc.abstractmethod
    def read_sampling(self) -> Sampling | None:
        """How the checkpoint's authors draw tokens; None where it does not say."""

    @abc.abstractmethod
    def file_bytes(self, names: Iterable[str]) -> int:
        """Bytes that `copy_files` writes."""

    @abc.abstractmethod
    def copy_files(self, names: Iterable[str], folder: Path) -> None:
        """Writes those of Hugging Face's text files into a folder that the source has."""
