"""The formats of packed tables: the embedding and the head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes import registry
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.models import Decoder, DecoderConfig
from mpjax.models.parameters import EMBEDDING, HEAD, name_of


def tables_of(named: Mapping[str, WeightFormat], config: DecoderConfig) -> dict[str, WeightFormat]:
    """The requested formats of tables, by the paths of the model's tables.

    named: formats by `head` and `embedding`. A tied table is the `embedding` and gets the format of
    either. Raises ValueError if two different formats are requested for it.
    """
    if not config.tie_word_embeddings:
        return dict(named)
    formats = {*named.values()}
    if len(formats) > 1:
        raise ValueError(
            f"the head is {named[HEAD]} and the embedding {named[EMBEDDING]}, but in this model "
            "they are one tied table: give it one format, by H or by E"
        )
    return dict.fromkeys((EMBEDDING,), formats.pop()) if formats else {}


def packed(tables: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """The entries with a packed format."""
    return {path: format for path, format in tables.items() if format.is_packed}


def configured(
    decoder: type[Decoder],
    config: DecoderConfig,
    modules: Mapping[str, Mapping[str, TensorInfo]],
    rounded: Iterable[str],
) -> DecoderConfig:
    """The configuration with `packed_tables` set: tables quantised in the files, or rounded.

    modules: the checkpoint's tensors by module and suffix. rounded: paths of 16-bit tables that are
    rounded when loaded. Raises CheckpointError for an embedding or a tied table that is quantised
    in the files.
    """
    found = {
        path: modules.get(name_of(decoder.names, path).removesuffix(".weight"), {})
        for path in (EMBEDDING, HEAD)
    }
    schemes = {path: registry.of_module(tensors) for path, tensors in found.items()}
    quantized = [path for path, kind in schemes.items() if kind and not kind.dequantizes_tables]
    for path in quantized:
        if path == EMBEDDING or config.tie_word_embeddings:
            name = name_of(decoder.names, path).removesuffix(".weight")
            raise CheckpointError(
                f"{name} is quantised ({', '.join(sorted(found[path]))}): of a checkpoint's "
                "tables only a head that is not tied to the embedding can be, so load one of the "
                f"model with {name} in 16 bits"
            )
    return dataclasses.replace(config, packed_tables=tuple(sorted({*quantized, *rounded})))
