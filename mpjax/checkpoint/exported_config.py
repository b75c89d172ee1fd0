"""The config.json of an exported model: a changed copy of the config.json of its source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpjax
from mpjax.checkpoint import huggingface
from mpjax.checkpoint.folder import CONFIG_NAME
from mpjax.errors import CheckpointError
from mpjax.kernels import files
from mpjax.language_model import LanguageModel
from mpjax.models import DecoderConfig

MARK = "mpjax_version"  # marks folders written by `mpjax.export`, which it may replace
DTYPE_KEYS = ("torch_dtype", "dtype")  # the older and the newer key; every reader knows the first
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Configuration fields that may differ from the file's: no shape depends on them.
IGNORED_FIELDS = ("max_position_embeddings", "stop_ids", "packed_tables")


def make(lm: LanguageModel, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config.json of an exported model, made from the config.json of its source.

    quantization: the `quantization_config`; None if no weight is packed.

    Raises ValueError if the source has no config.json, or the config.json of another model.
    """
    path = lm.source / CONFIG_NAME
    if not lm.source.is_file() and not os.path.lexists(path):
        raise ValueError(
            f"{lm.source} has no {CONFIG_NAME}, which an export begins with: set the "
            "model's source to a folder with that of its family"
        )
    hf = huggingface.read_config(lm.source)
    hf = {key: value for key, value in hf.items() if key not in QUANTIZATION_KEYS}
    keys = [key for key in DTYPE_KEYS if key in hf] or DTYPE_KEYS[:1]
    hf |= dict.fromkeys(keys, lm.config.dtype)
    hf |= {"tie_word_embeddings": lm.config.tie_word_embeddings, MARK: mpjax.__version__}
    _require_same(lm, path, hf)
    return hf if quantization is None else hf | {"quantization_config": {**quantization}}


def is_marked(folder: Path) -> bool:
    """Whether `mpjax.export` has written a folder."""
    path = folder / CONFIG_NAME
    try:
        return MARK in files.read_object(path, CheckpointError)
    except (CheckpointError, OSError):
        return False


def _require_same(lm: LanguageModel, path: Path, hf: Mapping[str, Any]) -> None:
    """Raises ValueError unless a config.json describes the model."""
    decoder, config = huggingface.decoder_config(lm.source, hf)
    if decoder is not type(lm.model):
        raise ValueError(
            f"{path} is of a {decoder.__name__}, and the model is a {type(lm.model).__name__}: set "
            "the model's source to a folder with its own"
        )
    # A config.json does not tell whether there is a layer that drafts.
    own = dataclasses.replace(lm.config, layers=lm.config.layers[: lm.config.depth])
    for field in dataclasses.fields(DecoderConfig):
        found, wanted = getattr(config, field.name), getattr(own, field.name)
        if field.name not in IGNORED_FIELDS and found != wanted:
            raise ValueError(
                f"{path} says another {field.name} ({found!s:.80}) than the model has "
                f"({wanted!s:.80}): set the model's source to a folder with its own"
            )
