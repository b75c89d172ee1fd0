"""Describes the files at a path, loadable or not, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mpjax.checkpoint.gguf.header import is_gguf
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.errors import CheckpointError

Found = TypeVar("Found")
SHOWN_FILES = 8


def survey(path: Path) -> list[tuple[str, str]]:
    """(label, text) pairs: kind of files, architecture, tensor types and sizes.

    Facts that can't be read are left out, without an error.
    """
    source = locate(path)
    config = _attempt(source.read_config) or {}
    rows = [("found", _kind(path))]
    if isinstance(source, GGUFSource):
        header = _attempt(lambda: source.header)
        values = {} if header is None else header.metadata
        rows += _given("name", values.get("general.name"))
        rows += _given("architecture", values.get("general.architecture"))
        if header is not None:
            types = Counter(tensor.type.name for tensor in header.tensors.values())
            rows.append(("tensors", _counts(types)))
            nbytes = sum(tensor.end - tensor.begin for tensor in header.tensors.values())
            rows.append(("weights", f"{nbytes / 1e6:,.1f} MB in the file"))
        return rows
    names = config.get("architectures")
    rows += _given("architecture", names if isinstance(names, str) else ", ".join(_texts(names)))
    written = config.get("quantization_config")
    if isinstance(written, dict):
        rows += _given("quantised by", written.get("quant_method", written.get("method")))
        rows += _given("its format", written.get("format", written.get("quant_algo")))
    checkpoint = _attempt(lambda: Checkpoint.open(path))
    if checkpoint is not None:
        types = Counter(info.dtype.name for info in checkpoint.tensors.values())
        rows.append(("tensors", _counts(types)))
        rows.append(("weights", f"{checkpoint.nbytes / 1e6:,.1f} MB in the files"))
    return rows


def _kind(path: Path) -> str:
    if is_gguf(path):
        return f"a GGUF file, {path}"
    if not path.is_dir():
        return f"no folder, {path}"
    names = sorted(child.name for child in path.iterdir() if not child.name.startswith("."))
    more = ", ..." if len(names) > SHOWN_FILES else ""
    return f"a folder, {path}: {', '.join(names[:SHOWN_FILES]) or 'empty'}{more}"


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in types.most_common())


def _given(label: str, value: Any) -> list[tuple[str, str]]:
    return [(label, value)] if isinstance(value, str) and value else []


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _attempt(read: Callable[[], Found]) -> Found | None:
    try:
        return read()
    except (CheckpointError, OSError):
        return None
