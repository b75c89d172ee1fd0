"""Calibrates static scales of a KV cache on text."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import require_documents
from mpjax.errors import NotFiniteError
from mpjax.evaluation.perplexity import DEFAULT_WINDOW
from mpjax.evaluation.windows import first_pieces
from mpjax.kernels import KVFormat, cache_scales
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.kv_state import KVState, has_equal_heads
from mpjax.models.parallel import JointState
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.state import StateSpec


def calibrate_cache(
    lm: LanguageModel,
    documents: Iterable[str],
    *,
    window: int | None = None,
    max_tokens: int = 32768,
) -> LanguageModel:
    """Calibrates scales for a cache in `lm.kv_format` (KV8s or KVfp8); returns a model with them.

    The model runs on windows of the documents, each with an empty context. The largest magnitude of
    keys and of values, of each channel for KV8s or of each head for KVfp8, maps to the largest code
    (mpjax.kernels.cache_scales). The returned model has them in `model.cache_scales`, which
    generation, evaluation and saving use. It shares its weights with `lm`, which is unchanged.

    window: tokens of a window; by default the smaller of 1024 and the model's positions.
    max_tokens: the most tokens in total.

    Raises ValueError for a KV format without calibrated scales, a model without a tokenizer or with
    another model's tokenizer, documents that are not a list of strings or have no token, and a
    window or max_tokens below 1; mpjax.errors.NotFiniteError, a ValueError, for keys or values that
    are NaN or infinite.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    require_documents(documents)
    format = lm.kv_format
    if format.scaling is None:
        raise ValueError(
            f"{format} has no scales to calibrate: load the model with KV8s or KVfp8, or set its "
            "kv_format"
        )
    if not any(KVState in map(type, _side_by_side(spec)) for spec in lm.config.states):
        raise ValueError(
            "no layer of the model has keys and values, so that there are no scales to calibrate: "
            "load it with KV16"
        )
    if not has_equal_heads(lm.config):
        raise ValueError(
            "the model's layers have heads of different sizes, for which no scales are calibrated: "
            "load it with KV16, KV8 or KV4"
        )
    tokenizer = lm.require_tokenizer()
    window = DEFAULT_WINDOW if window is None else window
    window = min(whole_number("window", window), lm.config.max_position_embeddings)
    max_tokens = whole_number("max_tokens", max_tokens)
    largest: jax.Array | None = None
    owners: list[int] = []  # index of each window's document
    finite: list[jax.Array] = []
    vocabulary = lm.config.vocab_size
    pieces = first_pieces(tokenizer, documents, vocabulary, window=window, most=max_tokens)
    for document, piece in pieces:
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : len(piece)] = piece
        found, is_finite = _largest(lm.model, jnp.asarray(tokens), jnp.int32(len(piece)))
        largest = found if largest is None else jnp.maximum(largest, found)
        owners.append(document)
        finite.append(is_finite)
    if largest is None:
        raise ValueError("documents are empty: expected a text with at least one token")
    for document, is_finite in zip(owners, jax.device_get(finite), strict=True):
        if not is_finite:
            raise NotFiniteError("document", document, lm.config.dtype)
    of_layers = jax.vmap(jax.vmap(functools.partial(cache_scales, format=format)))
    model = nnx.clone(lm.model)
    model.put_cache_scales(of_layers(largest[:, :, None]))
    return lm.with_model(model)


def _side_by_side(spec: StateSpec) -> tuple[StateSpec, ...]:
    """The states of each mixer of a layer."""
    return spec.states if isinstance(spec, JointState) else (spec,)


@jax.jit
def _largest(model: Decoder, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_largest_of_heads`, also for a model divided among devices."""
    if isinstance(model, ShardedDecoder):
        return model.map_heads(_largest_of_heads, tokens, count)
    return _largest_of_heads(model, tokens, count)


def _largest_of_heads(
    model: Decoder, tokens: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The largest magnitudes of keys and values, and whether all are finite (bool scalar).

    Layers without keys and values get unused magnitudes of 1.
    tokens: int32 [1, window], of which the first `count` are real. Magnitudes are float32 [layers,
    2 (keys, values), KV heads, head_dim].
    """
    cache = model.create_cache(1, tokens.shape[1], KVFormat())
    _, cache = model.step(tokens, count[None], cache, fresh=True)

    def largest(state: Any, spec: StateSpec, group: int | None) -> tuple[jax.Array, jax.Array]:
        states = state if isinstance(spec, JointState) else [state]
        for own, each in zip(states, _side_by_side(spec), strict=True):
            if isinstance(each, KVState):
                assert group is not None
                return each.largest(own, cache.tables[group], count)
        shape = 2, model.config.num_kv_heads, model.config.head_dim
        return jnp.ones(shape), jnp.bool_(True)

    each = map(largest, cache.layers, model.config.states, model.config.groups)
    found, finite = zip(*each, strict=True)
    return jnp.stack(found), jnp.stack(finite).all()
