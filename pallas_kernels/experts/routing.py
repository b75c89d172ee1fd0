"""Routing: which experts of a mixture a token is sent to, and with which weights."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import (
    as_array,
    optional_array,
    require_type,
    shown,
    static_number,
    whole_number,
)

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top_two"]
LEAST_SUM = 1e-20  # added to a sum of weights before weights are divided by it (DeepSeek-V3)


@dataclasses.dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted; static and hashable.

    per_token: the number of experts of a token.
    scoring: the function from logits to scores, in float32: a softmax over all experts, or a
        sigmoid.
    renormalize: whether the weights of a token's experts, their scores, are divided by their sum.
        Of a softmax that gives the softmax over the chosen logits alone.
    scale: the factor of all weights, after they are renormalised.
    groups, groups_per_token: if the experts are divided into `groups` of neighbours, a token's
        experts come out of its best `groups_per_token` of them (DeepSeek); None: out of all.
    group_score: the score of a group: its largest score (DeepSeek-V2), or the sum of its two
        largest (DeepSeek-V3).

    Raises ValueError for values that don't fit together.
    """

    per_token: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    groups_per_token: int | None = None
    group_score: GroupScore = "max"

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_token", whole_number("Routing: per_token", self.per_token))
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"Routing: renormalize is {shown(self.renormalize)}: expected a bool")
        scale = static_number("Routing: scale", self.scale, float, "a positive number")
        object.__setattr__(self, "scale", 1.0 if scale is None else scale)
        for name, value, known in (
            ("scoring", self.scoring, get_args(Scoring)),
            ("group_score", self.group_score, get_args(GroupScore)),
        ):
            if not isinstance(value, str) or value not in known:
                expected = " or ".join(known)
                raise ValueError(f"Routing: {name} is {shown(value)}: expected {expected}")
        if (self.groups is None) != (self.groups_per_token is None):
            raise ValueError(
                f"Routing: groups is {shown(self.groups)} and groups_per_token "
                f"{shown(self.groups_per_token)}: expected both, or neither"
            )
        for name in ("groups", "groups_per_token"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(f"Routing: {name}", value))

    def why_not(self, experts: int) -> str | None:
        """The reason why a token can't be routed to one of `experts` experts, or None if it can."""
        if self.per_token > experts:
            return f"{self.per_token} experts per token are more than the {experts} that there are"
        if self.groups is None or self.groups_per_token is None:
            return None
        if experts % self.groups:
            return f"{experts} experts can't be divided into {self.groups} groups"
        size = experts // self.groups
        if not 0 < self.groups_per_token <= self.groups:
            return f"{self.groups_per_token} groups per token: expected 1 to {self.groups}"
        if self.per_token > self.groups_per_token * size:
            return (
                f"{self.per_token} experts per token are more than {self.groups_per_token} groups "
                f"of {size} have"
            )
        if self.group_score == "top_two" and size < 2:
            return f"groups of {size} expert have no two largest scores"
        return None


def route(
    logits: jax.Array, routing: Routing, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [..., k], and their weights, float32 [..., k].

    logits: [..., experts], of any floating dtype; scores are computed in float32. correction:
    [experts], added to the scores by which experts are chosen, but not to weights (DeepSeek-V3).

    A token's experts come in the descending order of their scores; of equal ones the expert of the
    lowest number comes first. Weights are differentiable with respect to the logits. Raises
    ValueError for shapes that don't fit.
    """
    require_type("route: routing", routing, Routing)
    logits = as_array("route: logits", logits)
    correction = optional_array("route: correction", correction)
    if not logits.ndim or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"route: logits are {shown(logits)}: expected floats [..., experts]")
    experts = logits.shape[-1]
    if reason := routing.why_not(experts):
        raise ValueError(f"route: {reason}")
    if correction is not None and correction.shape != (experts,):
        raise ValueError(f"route: correction is {shown(correction)}: expected shape ({experts},)")
    wide = logits.astype(jnp.float32)
    is_softmax = routing.scoring == "softmax"
    scores = jax.nn.softmax(wide, -1) if is_softmax else jax.nn.sigmoid(wide)
    # A softmax keeps the order of logits, but may round different ones to equal scores.
    ranked = wide if is_softmax and correction is None else scores
    if correction is not None:
        ranked = ranked + jax.lax.broadcast_to_rank(correction.astype(jnp.float32), ranked.ndim)
    _, chosen = jax.lax.top_k(_in_best_groups(ranked, routing), routing.per_token)
    weights = jnp.take_along_axis(scores, chosen, -1)
    if routing.renormalize:
        if is_softmax:
            weights = jax.nn.softmax(jnp.take_along_axis(wide, chosen, -1), -1)
        else:
            weights = weights / (weights.sum(-1, keepdims=True) + LEAST_SUM)
    return chosen.astype(jnp.int32), weights * routing.scale


def _in_best_groups(ranked: jax.Array, routing: Routing) -> jax.Array:
    """The scores [..., experts], with −∞ for experts outside of the token's best groups."""
    if routing.groups is None or routing.groups_per_token is None:
        return ranked
    grouped = ranked.reshape(*ranked.shape[:-1], routing.groups, -1)
    best, _ = jax.lax.top_k(grouped, 2 if routing.group_score == "top_two" else 1)
    _, groups = jax.lax.top_k(best.sum(-1), routing.groups_per_token)
    kept = jax.nn.one_hot(groups, routing.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)
