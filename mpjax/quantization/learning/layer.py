"""Learns the scales of one layer against the outputs of its 16-bit version."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models import DecoderLayer, Linear
from mpjax.quantization.learning.descent import Learning, descend, mean
from mpjax.quantization.learning.learned_linear import (
    Learned,
    LearnedLinear,
    pack_all,
    replace_linears,
)


class HiddenStates(Protocol):
    """The hidden states before a layer; `pipeline.Stream` is one.

    states: for each batch, [batch, tokens, hidden]. is_real: for each batch, bool [batch, tokens].
    angles: float32 [batch, tokens, head_dim / 2], by kind of RoPE.
    """

    states: list[np.ndarray]
    is_real: list[np.ndarray]
    angles: dict[str, jax.Array]


def learn_layer(
    plain: DecoderLayer,
    layer: DecoderLayer,
    stream: HiddenStates,
    paths: Sequence[str],
    learning: Learning,
) -> list[float]:
    """Learns the scales of the linear maps at `paths`, and packs them into the layer.

    plain: the 16-bit layer, whose outputs are the target.

    The loss is the mean over tokens of |error|² / |output|², because the next norm normalises each
    token: so the few very large tokens count no more than others. Returns the losses at the start
    and after each epoch; the layer gets the scales with the least loss.
    """

    def change(_: str, linear: Linear) -> Linear:
        return LearnedLinear(linear, learns_table=learning.table)

    replace_linears(layer, paths, change)
    batches = list(zip(stream.states, stream.is_real, strict=True))
    parts: Any = nnx.split(layer, Learned, ...)
    graph, start, rest = parts

    def loss_of(parameters: Any) -> float:
        return mean(
            _loss(graph, parameters, rest, plain, states, is_real, stream.angles)
            for states, is_real in batches
        )

    def gradient(parameters: Any, index: int) -> Any:
        return _gradient(graph, parameters, rest, plain, *batches[index], stream.angles)

    best, losses = descend(learning, start, len(batches), gradient, loss_of)
    nnx.update(layer, best)
    pack_all(layer, paths)
    return losses


def _sums(
    graph: Any,
    parameters: Any,
    rest: Any,
    plain: DecoderLayer,
    states: jax.Array,
    is_real: jax.Array,
    angles: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The sum of the relative squared errors of real tokens, and their number."""
    layer = nnx.merge(graph, parameters, rest)
    expected, _ = plain.inputs(states, angles)
    found, _ = layer.inputs(states, angles)
    expected, found = (x.astype(jnp.float32) for x in (expected, found))
    sizes = jnp.maximum((expected**2).sum(-1), jnp.finfo(jnp.float32).tiny)
    errors = ((found - expected) ** 2).sum(-1) / sizes
    return jnp.where(is_real, errors, 0.0).sum(), is_real.sum().astype(jnp.float32)


_loss = jax.jit(_sums, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(graph: Any, parameters: Any, *given: Any) -> Any:
    def loss(parameters: Any) -> jax.Array:
        total, count = _sums(graph, parameters, *given)
        return total / jnp.maximum(count, 1.0)

    return jax.grad(loss)(parameters)
