"""Corrects the configuration by the checkpoint's tensors: tied head, and dtype."""

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
    """Makes a checkpoint and its configuration agree, and returns both.

    A tied table may have the embedding's or the head's name; the returned checkpoint uses the
    embedding's. If both are present and differ (both are read to compare them), the configuration
    becomes untied, as in transformers, with a warning. If hf (config.json) has no dtype, the
    configuration takes the embedding's.

    Files of a model without a head, such as embedding models, omit the prefix `model.` of tensor
    names: the returned checkpoint has it, and an untied model predicts no tokens.
    """
    embedding, head = name_of(decoder.names, "embedding"), name_of(decoder.names, "head")
    checkpoint, is_bare = _with_prefix(checkpoint, embedding)
    if is_bare and not config.tie_word_embeddings and head not in checkpoint.tensors:
        config = dataclasses.replace(config, predicts=False, tie_word_embeddings=True)
    checkpoint, config = _settle_head(checkpoint, config, embedding, head)
    stored = checkpoint.tensors.get(embedding)
    is_open = not (hf.get("dtype") or hf.get("torch_dtype"))
    if is_open and stored is not None and stored.dtype.name in FLOAT_DTYPES:
        config = dataclasses.replace(config, dtype=stored.dtype.name)
    return checkpoint, config


def _with_prefix(checkpoint: Checkpoint, embedding: str) -> tuple[Checkpoint, bool]:
    """The checkpoint with the prefix in all names, and whether it was missing."""
    prefix, _, bare = embedding.partition(".")
    if embedding in checkpoint.tensors or bare not in checkpoint.tensors:
        return checkpoint, False
    named = {
        name: dataclasses.replace(info, name=name)
        for old, info in checkpoint.tensors.items()
        for name in [f"{prefix}.{old}"]
    }
    return dataclasses.replace(checkpoint, tensors=types.MappingProxyType(named)), True


def _settle_head(
    checkpoint: Checkpoint, config: DecoderConfig, embedding: str, head: str
) -> tuple[Checkpoint, DecoderConfig]:
    tensors = checkpoint.tensors
    if not config.tie_word_embeddings or head not in tensors:
        return checkpoint, config
    if embedding not in tensors:  # safetensors' save_model keeps only one name of a shared tensor
        named = types.MappingProxyType({**tensors, embedding: tensors[head]})
        return dataclasses.replace(checkpoint, tensors=named), config
    if len(tensors[embedding].shape) != 2:  # `make_plan` refuses such an embedding
        return checkpoint, config
    are_numbers = all(tensors[name].dtype.name in FLOAT_DTYPES for name in (embedding, head))
    if are_numbers and _are_equal(checkpoint.read(embedding), checkpoint.read(head)):
        return checkpoint, config
    warnings.warn(
        f"{checkpoint.folder}: config.json says tie_word_embeddings: true, but {head} is not "
        f"{embedding}: the model gets both; set tie_word_embeddings to false if that is right",
        stacklevel=2,
    )
    return checkpoint, dataclasses.replace(config, tie_word_embeddings=False)


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two tables hold the same numbers; compares COMPARED_ROWS rows at a time."""
    if first.shape != second.shape:
        return False
    runs = [slice(begin, begin + COMPARED_ROWS) for begin in range(0, len(first), COMPARED_ROWS)]
    return all(
        np.array_equal(first[run].astype(np.float32), second[run].astype(np.float32))
        for run in runs
    )
