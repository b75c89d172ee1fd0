"""Measuring the scales that a KV cache is given, on text that the model reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import require_documents, require_known_ids
from mpjax.evaluation import DEFAULT_WINDOW, document_tokens
from mpjax.finite import NotFiniteError
from mpjax.kernels import KVFormat, KVPages, cache_scales
from mpjax.kernels.checks import require_type, whole_number
from mpjax.kernels.kv_cache.reference import gather
from mpjax.language_model import LanguageModel
from mpjax.models import CacheScales, Decoder


def calibrate_cache(
    lm: LanguageModel,
    documents: Iterable[str],
    *,
    window: int | None = None,
    max_tokens: int = 32768,
) -> LanguageModel:
    """The model with scales for a cache in `lm.kv_format`, KV8s or KVfp8, measured on documents.

    The documents are read in windows, each from an empty context, and the largest keys and values
    become the largest codes (mpjax.kernels.cache_scales). Scales are part of the result's model,
    in `model.cache_scales`: generation, evaluation and saving take them along. Weights are shared
    with `lm`, which stays as it is.

    window: tokens of a window; 1024 by default, or the model's longest context. max_tokens: to read
    at most.

    Raises ValueError for a format that is given no scales, a model without a tokenizer or with
    another model's, documents that are no list or without a token, and a window or max_tokens
    below 1; mpjax.finite.NotFiniteError, a ValueError, for keys or values that are NaN or infinite.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    require_documents(documents)
    format = lm.kv_format
    if format.scaling is None:
        raise ValueError(f"{format} is given no scales to calibrate: KV8s and KVfp8 are")
    tokenizer = lm.require_tokenizer()
    window = DEFAULT_WINDOW if window is None else window
    window = min(whole_number("window", window), lm.config.max_position_embeddings)
    max_tokens = whole_number("max_tokens", max_tokens)
    largest: jax.Array | None = None
    left = max_tokens
    owners: list[int] = []  # of each window its document
    finite: list[jax.Array] = []
    for document, text in enumerate(documents):
        ids = document_tokens(tokenizer, text)[:left]
        require_known_ids([ids], lm.config.vocab_size)
        left -= len(ids)
        for begin in range(0, len(ids), window):
            piece = ids[begin : begin + window]
            tokens = np.zeros((1, window), np.int32)
            tokens[0, : len(piece)] = piece
            found, is_finite = _largest(lm.model, jnp.asarray(tokens), jnp.int32(len(piece)))
            largest = found if largest is None else jnp.maximum(largest, found)
            owners.append(document)
            finite.append(is_finite)
        if left == 0:
            break
    if largest is None:
        raise ValueError("there is nothing to calibrate on: the documents are empty")
    for document, is_finite in zip(owners, jax.device_get(finite), strict=True):
        if not is_finite:
            raise NotFiniteError("document", document, lm.config.dtype)
    of_layers = jax.vmap(jax.vmap(functools.partial(cache_scales, format=format)))
    model = nnx.merge(*nnx.split(lm.model))
    model.cache_scales = CacheScales(of_layers(largest[:, :, None]))
    return dataclasses.replace(lm, model=model)


@jax.jit
def _largest(model: Decoder, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of keys and values of the first `count` tokens: the largest, and whether all are finite.

    The largest are float32 [layers, 2, KV heads, head dim], keys first.
    """
    cache = model.create_cache(1, tokens.shape[1], KVFormat())
    _, cache = model.step(tokens, count[None], cache, fresh=True)

    def largest(pages: KVPages) -> tuple[jax.Array, jax.Array]:
        sides = jnp.stack(gather(pages, cache.block_tables))
        real = (jnp.arange(sides.shape[2]) < count)[None, None, :, None, None]
        sides = jnp.where(real, jnp.abs(sides), 0.0)
        # A maximum passes over NaN on a CPU.
        return sides.max((1, 2)), jnp.isfinite(sides).all()

    found, finite = zip(*map(largest, cache.layers), strict=True)
    return jnp.stack(found), jnp.stack(finite).all()
