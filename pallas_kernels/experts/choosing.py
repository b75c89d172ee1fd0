"""The choice of one expert of a token inside of a kernel, which the programs of a product repeat.

All logits are compared with each other at once, in the place of one search after another: a program
finds the expert that has as many before it as its pair has experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.routing_rules import Routing
from mpjax.kernels.experts.routing_triton import load_logits

MOST_EXPERTS = 128  # comparisons grow with their square: 16,384 take a program 0.3 µs


def why_not(routing: Routing, experts: int, *, corrected: bool) -> str | None:
    """The reason why a product can't choose experts, or None if it can.

    corrected: whether scores have a correction.
    """
    if experts > MOST_EXPERTS:
        return f"{experts} experts; a product chooses among up to {MOST_EXPERTS}"
    if routing.scoring != "softmax" or corrected:
        return "experts are ranked by corrected or sigmoid scores; a product ranks logits"
    if routing.groups is not None:
        return "experts come out of groups"
    return None


def choose(
    logits: RouterLogits, token: jax.Array, choice: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The number of a token's expert, int32, and its weight, float32, of the choice 0 … k − 1.

    logits: references. Both are those of `route`, whose order of equal logits is that of experts.
    """
    routing, count = logits.routing, logits.logits.shape[1]
    number, is_expert, own = load_logits(logits.logits, logits.bias, token)
    other, of_other = own[None, :], number[None, :]
    comes_before = (other > own[:, None]) | ((other == own[:, None]) & (of_other < number[:, None]))
    rank = comes_before.astype(jnp.int32).sum(1)
    scores = jnp.exp(own - own.max())
    counts = rank < routing.per_token if routing.renormalize else is_expert
    total = jnp.where(counts, scores, 0.0).sum()
    is_chosen = rank == choice
    # NaN has no rank, so that several experts, or none, may have the one that is wanted.
    expert = jnp.minimum(jnp.where(is_chosen, number, 0).sum(), count - 1)
    weight = jnp.where(is_chosen, scores, 0.0).sum() / total * routing.scale
    return expert, weight
