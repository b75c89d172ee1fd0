"""What the tensors of a checkpoint decide where config.json says nothing, or something else."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.models import Decoder, DecoderConfig
from mpjax.models.parameters import name_of

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
COMPARED_ROWS = 1024


def settle(
    checkpoint: Checkpoint, decoder: type[Decoder], config: DecoderConfig, hf: Mapping[str, Any]
) -> tuple[Checkpoint, DecoderConfig]:
    """The checkpoint and the configuration that agree with each other.

    A tied head and embedding may stand under either name. Where they stand under both and differ,
    they are two, as in transformers, and there is a warning: to see that, both are read. Where hf,
    config.json, has no dtype, it is the embedding's.
    """
    embedding, head = name_of(decoder.names, "embedding"), name_of(decoder.names, "head")
    checkpoint, config = _settle_head(checkpoint, config, embedding, head)
    stored = checkpoint.tensors.get(embedding)
    is_open = not (hf.get("dtype") or hf.get("torch_dtype"))
    if is_open and stored is not None and stored.dtype.name in FLOAT_DTYPES:
        config = dataclasses.replace(config, dtype=stored.dtype.name)
    return checkpoint, config


def _settle_head(
    checkpoint: Checkpoint, config: DecoderConfig, embedding: str, head: str
) -> tuple[Checkpoint, DecoderConfig]:
    tensors = checkpoint.tensors
    if not config.tie_word_embeddings or head not in tensors:
        return checkpoint, config
    if embedding not in tensors:  # of tensors that share memory, safetensors' save_model keeps one
        named = types.MappingProxyType({**tensors, embedding: tensors[head]})
        return dataclasses.replace(checkpoint, tensors=named), config
    if len(tensors[embedding].shape) != 2:  # which `make_plan` refuses
        return checkpoint, config
    are_numbers = all(tensors[name].dtype.name in FLOAT_DTYPES for name in (embedding, head))
    if are_numbers and _are_equal(checkpoint.read(embedding), checkpoint.read(head)):
        return checkpoint, config
    warnings.warn(
        f"{checkpoint.folder}: config.json says tie_word_embeddings: true, but {head} is not "
        f"{embedding}: the model has both; write false there if that is what it is",
        stacklevel=2,
    )
    return checkpoint, dataclasses.replace(config, tie_word_embeddings=False)


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two tables hold the same numbers; a few rows at a time, up to some that differ."""
    if first.shape != second.shape:
        return False
    runs = [slice(begin, begin + COMPARED_ROWS) for begin in range(0, len(first), COMPARED_ROWS)]
    return all(
        np.array_equal(first[run].astype(np.float32), second[run].astype(np.float32))
        for run in runs
    )
