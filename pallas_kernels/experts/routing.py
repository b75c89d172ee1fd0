"""Routing: the experts to which a token is sent, and their weights."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import are_between, as_array, optional_array, require_type, shown
from mpjax.kernels.experts import routing_triton
from mpjax.kernels.experts.routing_rules import LEAST_SUM, Routing
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import in_row_tiles

Implementation = Literal["triton", "reference"]


def route(
    logits: jax.Array,
    routing: Routing,
    correction: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    chosen: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [..., k], and their weights, float32 [..., k].

    logits: [..., experts], of any floating dtype; scores are computed in float32. correction:
    [experts], the selection bias: added to scores to choose experts, but not to weights
    (DeepSeek-V3); not with sparsemixer.
    bias: [experts], added to the logits (gpt-oss).
    chosen: int [..., k], experts that are given, for which weights alone are computed, from the
        logits as for chosen ones; None: they are chosen.
    implementation: `triton`, one kernel, on a CUDA GPU; or `reference`, plain jnp. By default the
        kernel if it can run.

    A token's experts are in descending order of their scores; of equal scores the expert of the
    lowest index comes first. Weights are differentiable with respect to the logits. Raises
    ValueError for shapes that don't fit, and UnsupportedError, with the reason, if a forced
    implementation can't run.
    """
    require_type("route: routing", routing, Routing)
    logits = as_array("route: logits", logits)
    correction = optional_array("route: correction", correction)
    bias = optional_array("route: bias", bias)
    if not logits.ndim or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"route: logits are {shown(logits)}: expected floats [..., experts]")
    experts = logits.shape[-1]
    if reason := routing.why_not(experts):
        raise ValueError(f"route: {reason}")
    if correction is not None and routing.scoring == "sparsemixer":
        raise ValueError("route: sparsemixer has no correction: expected None")
    for what, array in (("correction", correction), ("bias", bias)):
        if array is not None and array.shape != (experts,):
            raise ValueError(f"route: {what} is {shown(array)}: expected shape ({experts},)")
    if chosen is not None:
        chosen = _read_chosen(chosen, logits, routing)
    name = choose(
        "route",
        implementation,
        "triton" if logits.size and chosen is None else "reference",
        get_args(Implementation),
        lambda _: device.why_triton_cannot_run() if chosen is None else "experts are given",
    )
    if name == "reference":
        return _reference(routing, logits, correction, bias, chosen)
    rows = logits.reshape(-1, experts)
    plain = functools.partial(_reference, routing)
    kernel = functools.partial(routing_triton.route, routing=routing)
    found: Any = with_gradients_of(plain, kernel, rows, correction, bias)
    chosen, weights = found
    leading = *logits.shape[:-1], routing.per_token
    return chosen.reshape(leading), weights.reshape(leading)


def _read_chosen(chosen: Any, logits: jax.Array, routing: Routing) -> jax.Array:
    """Experts that are given, int32. Raises ValueError for other shapes, dtypes and indices."""
    chosen, experts = as_array("route: chosen", chosen), logits.shape[-1]
    shape = *logits.shape[:-1], routing.per_token
    if chosen.shape != shape or not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise ValueError(f"route: chosen is {shown(chosen)}: expected integers of shape {shape}")
    if not are_between(chosen, 0, experts - 1):
        raise ValueError(f"route: chosen must be from 0 to {experts - 1}, the experts")
    return chosen.astype(jnp.int32)


def _reference(
    routing: Routing,
    logits: jax.Array,
    correction: jax.Array | None,
    bias: jax.Array | None,
    chosen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    wide = logits.astype(jnp.float32)
    if bias is not None:
        wide += jax.lax.broadcast_to_rank(bias.astype(jnp.float32), wide.ndim)
    if routing.scoring == "sparsemixer":
        return _sparsemixer(routing, wide)
    is_softmax = routing.scoring == "softmax"
    scores = in_row_tiles(jax.nn.softmax, wide) if is_softmax else jax.nn.sigmoid(wide)
    ranked = wide if routing.ranks_logits and correction is None else scores
    if correction is not None:
        ranked = ranked + jax.lax.broadcast_to_rank(correction.astype(jnp.float32), ranked.ndim)
    if chosen is None:
        _, chosen = jax.lax.top_k(_in_best_groups(ranked, routing), routing.per_token)
    weights = jnp.take_along_axis(scores, chosen, -1)
    if routing.renormalize:
        if is_softmax:
            weights = in_row_tiles(jax.nn.softmax, jnp.take_along_axis(wide, chosen, -1))
        else:
            total = in_row_tiles(functools.partial(jnp.sum, axis=-1, keepdims=True), weights)
            weights = weights / (total + LEAST_SUM)
    return chosen.astype(jnp.int32), weights * routing.scale


def _sparsemixer(routing: Routing, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best experts of float32 logits, and their softmax over the experts near each."""
    assert routing.jitter is not None
    best, chosen = jax.lax.top_k(logits, routing.per_token)
    is_chosen = jax.nn.one_hot(chosen, logits.shape[-1], dtype=jnp.int32)  # [..., k, experts]
    is_free = jnp.cumsum(is_chosen, -2) == is_chosen  # not chosen by an earlier choice
    best, logits = best[..., None], logits[..., None, :]
    is_near = best - logits <= 2 * routing.jitter * jnp.maximum(jnp.abs(logits), best)
    scores = jnp.where(is_free & is_near, jnp.exp(jnp.minimum(logits - best, 0)), 0)
    return chosen.astype(jnp.int32), routing.scale / scores.sum(-1)


def _in_best_groups(ranked: jax.Array, routing: Routing) -> jax.Array:
    """The scores [..., experts], with −∞ for experts outside of the token's best groups."""
    if routing.groups is None or routing.groups_per_token is None:
        return ranked
    grouped = ranked.reshape(*ranked.shape[:-1], routing.groups, -1)
    best, _ = jax.lax.top_k(grouped, 2 if routing.group_score == "top_two" else 1)
    _, groups = jax.lax.top_k(best.sum(-1), routing.groups_per_token)
    kept = jax.nn.one_hot(groups, routing.groups, dtype=jnp.bool_).any(-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)
