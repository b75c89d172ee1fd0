"""Chooses the source of a checkpoint by its path."""

from __future__ import annotations

from pathlib import Path

from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.gguf.header import is_gguf
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.checkpoint.source import Source


def locate(path: Path) -> Source:
    """The source at a path: a GGUF file, or otherwise a Hugging Face folder."""
    return GGUFSource(path) if is_gguf(path) else HuggingFaceFolder(path)
