"""Routing as one kernel, with a program for each token; XLA takes five kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.experts.routing_rules import LEAST_SUM, Routing
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store

EXPERTS_OF_A_WARP = 256  # a program for more experts has four warps


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def route(
    logits: jax.Array,
    correction: jax.Array | None,
    bias: jax.Array | None,
    routing: Routing,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The experts int32 [tokens, k] and weights float32 [tokens, k] of logits [tokens, experts]."""
    tokens, experts = logits.shape
    shape = tokens, routing.per_token
    return launch(
        functools.partial(_kernel, routing=routing),
        (logits, correction, bias),
        out_shape=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(tokens,),
        settings=Settings("route", warps=1 if experts <= EXPERTS_OF_A_WARP else 4),
        interpret=interpret,
    )


def _kernel(
    inputs: tuple[Any, Any, Any], experts_ref: Any, weights_ref: Any, *, routing: Routing
) -> None:
    logits_ref, correction_ref, bias_ref = inputs
    token, count = first_program_id(), logits_ref.shape[1]
    number, is_free, logits = load_logits(logits_ref, bias_ref, token)
    if routing.scoring != "sigmoid":
        scores = jnp.exp(logits - logits.max())
        total = scores.sum()
    else:
        scores, total = 1.0 / (1.0 + jnp.exp(-logits)), jnp.float32(1.0)
    if correction_ref is not None:
        ranked = scores / total + load_masked(correction_ref.at[number], is_free).astype(
            jnp.float32
        )
    else:
        ranked = logits if routing.ranks_logits else scores
    if routing.groups is not None:
        ranked = jnp.where(_is_in_best_groups(ranked, count, routing), ranked, -jnp.inf)
    place = jnp.arange(pl.next_power_of_2(routing.per_token))
    chosen, weights = jnp.zeros(place.shape, jnp.int32), jnp.zeros(place.shape, jnp.float32)
    for choice in range(routing.per_token):
        best = jnp.where(is_free, ranked, -jnp.inf).max()
        index = jnp.where(is_free & (ranked == best), number, count - 1).min()
        is_chosen = number == index
        if routing.jitter is not None:  # sparsemixer
            margin = 2 * routing.jitter * jnp.maximum(jnp.abs(logits), best)
            is_near = is_free & (best - logits <= margin)
            weight = total / jnp.where(is_near, jnp.exp(logits - best), 0.0).sum()
        else:
            weight = jnp.where(is_chosen, scores, 0.0).sum()
        is_free &= ~is_chosen
        chosen = jnp.where(place == choice, index, chosen)
        weights = jnp.where(place == choice, weight, weights)
    if routing.renormalize:
        total = weights.sum() + (0.0 if routing.scoring == "softmax" else LEAST_SUM)
    is_wanted = place < routing.per_token
    # In interpret mode, a masked-out lane writes the old value back. Index `per_token`, which no
    # other lane uses, keeps it from overwriting a real entry.
    place = jnp.where(is_wanted, place, routing.per_token)
    store(experts_ref.at[token, place], chosen, mask=is_wanted)
    store(weights_ref.at[token, place], weights / total * routing.scale, mask=is_wanted)


def load_logits(
    logits_ref: Any, bias_ref: Any, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """In a kernel, the lane indices, whether each lane has an expert, and a token's logits.

    The number of lanes is a power of two. Logits are float32, include the bias, and are −∞ after
    the last expert.
    """
    count = logits_ref.shape[1]
    number = jnp.arange(pl.next_power_of_2(count))
    is_expert = number < count
    logits = load_masked(logits_ref.at[token, number], is_expert).astype(jnp.float32)
    if bias_ref is not None:
        logits += load_masked(bias_ref.at[number], is_expert).astype(jnp.float32)
    return number, is_expert, jnp.where(is_expert, logits, -jnp.inf)


def _is_in_best_groups(ranked: jax.Array, count: int, routing: Routing) -> jax.Array:
    """Whether each lane's expert is in one of the token's best groups.

    ranked: [lanes], a power of two; lanes after the `count` experts are in no group.
    """
    assert routing.groups is not None
    assert routing.groups_per_token is not None
    number, size = jnp.arange(ranked.shape[0]), count // routing.groups
    place = jnp.arange(pl.next_power_of_2(routing.groups))
    scores = jnp.full(place.shape, -jnp.inf, jnp.float32)
    for group in range(routing.groups):
        is_of_group = (number >= group * size) & (number < (group + 1) * size)
        score = _score(jnp.where(is_of_group, ranked, -jnp.inf), group * size, routing)
        scores = jnp.where(place == group, score, scores)
    is_free, is_best = place < routing.groups, number < 0
    for _ in range(routing.groups_per_token):
        best = jnp.where(is_free, scores, -jnp.inf).max()
        index = jnp.where(is_free & (scores == best), place, routing.groups - 1).min()
        is_free &= place != index
        is_best |= (number >= index * size) & (number < (index + 1) * size)
    return is_best


def _score(ranked: jax.Array, first: int, routing: Routing) -> jax.Array:
    """The score of a group: its largest one, or the sum of its two largest ones.

    ranked: the scores of all lanes, −∞ outside of the group. first: the group's first lane.
    """
    best = ranked.max()
    if routing.group_score == "max":
        return best
    number = jnp.arange(ranked.shape[0])
    index = jnp.where((ranked == best) & (number >= first), number, ranked.shape[0] - 1).min()
    return best + jnp.where(number == index, -jnp.inf, ranked).max()
