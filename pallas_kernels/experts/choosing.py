"""Top-k routing inside the kernel of a product: each program finds the expert of its pair.

All logits are compared with each other at once, instead of searching k times: an expert's rank is
the number of larger logits, and a program takes the expert of its pair's rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.routing_rules import Routing
from mpjax.kernels.experts.routing_triton import load_logits

MOST_EXPERTS = 128  # the number of comparisons is its square


def why_not(routing: Routing, experts: int, *, corrected: bool) -> str | None:
    """The reason why a product's kernel can't choose experts, or None if it can.

    corrected: whether there is a selection bias.
    """
    if experts > MOST_EXPERTS:
        return f"{experts} experts; a product chooses among up to {MOST_EXPERTS}"
    if routing.scoring != "softmax" or corrected:
        return "experts are ranked by corrected or sigmoid scores, or weighted by sparsemixer"
    if routing.groups is not None:
        return "experts come out of groups"
    return None


class Choice(NamedTuple):
    """A token's expert of some rank, int32, and the values that determine its weight.

    is_chosen: bool [lanes], true at the expert; is_counted: bool [lanes], the experts over whose
    scores the weight is normalised; logits: float32 [lanes]. scale: of weights.
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
    """A token's expert of rank `choice`, 0 … k − 1, and its weight, as `route` returns them.

    logits: references to [tokens, experts]. token, choice: int32 scalars.

    Of equal logits, the expert of the lowest index comes first.
    """
    routing, count = logits.routing, logits.logits.shape[1]
    number, is_expert, own = load_logits(logits.logits, logits.bias, token)
    # Summed along columns, which a thread has in its registers. Sums along rows would go through
    # shared memory, part after part, with a barrier before and after each.
    other, of_other = own[:, None], number[:, None]
    comes_before = (other > own[None, :]) | ((other == own[None, :]) & (of_other < number[None, :]))
    rank = comes_before.astype(jnp.int32).sum(0)
    is_chosen = rank == choice
    # NaN has no rank, so several experts, or none, may have the wanted rank.
    expert = jnp.minimum(jnp.where(is_chosen, number, 0).sum(), count - 1)
    is_counted = rank < routing.per_token if routing.renormalize else is_expert
    return Choice(expert, is_chosen, is_counted, own, routing.scale)
