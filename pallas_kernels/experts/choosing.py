"""The choice of one expert of a token inside of a kernel, which the programs of a product repeat.

All logits are compared with each other at once, instead of searching k times: an expert's rank is
the number of larger logits, and a program takes the expert whose rank is that of its pair.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.routing_rules import Routing
from mpjax.kernels.experts.routing_triton import load_logits

MOST_EXPERTS = 128  # comparisons grow with their square


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


class Choice(NamedTuple):
    """The expert of a token that has a rank, int32, and what its weight follows from.

    is_chosen: bool [lanes], where the expert is; is_counted: the experts whose scores the weight is
    a share of; logits: float32 [lanes]. scale: of weights.
    """

    expert: jax.Array
    is_chosen: jax.Array
    is_counted: jax.Array
    logits: jax.Array
    scale: float

    def weight(self) -> jax.Array:
        """The weight of the expert, float32."""
        scores = jnp.exp(self.logits - self.logits.max())
        total = jnp.where(self.is_counted, scores, 0.0).sum()
        return jnp.where(self.is_chosen, scores, 0.0).sum() / total * self.scale


def choose(logits: RouterLogits, token: jax.Array, choice: jax.Array) -> Choice:
    """A token's expert of the rank `choice`, 0 … k − 1: that of `route`, with its weight.

    logits: references to [tokens, experts]. token, choice: int32 scalars.

    Of equal logits, that of the lowest expert comes first.
    """
    routing, count = logits.routing, logits.logits.shape[1]
    number, is_expert, own = load_logits(logits.logits, logits.bias, token)
    # Summed along columns, of which a thread has a few whole parts in registers. The compiler sums
    # rows through shared memory, part after part, with a barrier before and after each.
    other, of_other = own[:, None], number[:, None]
    comes_before = (other > own[None, :]) | ((other == own[None, :]) & (of_other < number[None, :]))
    rank = comes_before.astype(jnp.int32).sum(0)
    is_chosen = rank == choice
    # NaN has no rank, so that several experts, or none, may have the one that is wanted.
    expert = jnp.minimum(jnp.where(is_chosen, number, 0).sum(), count - 1)
    is_counted = rank < routing.per_token if routing.renormalize else is_expert
    return Choice(expert, is_chosen, is_counted, own, routing.scale)
