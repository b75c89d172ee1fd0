"""Learned weight clipping: gradient descent on the clipping range of each group.

The range min … max of a group is multiplied by a learned factor at each end. Descent minimises the
output error of all groups together; the search of `ranges` treats each group separately. Shao et
al., "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models" (2023), §3.2;
used by COMET.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import WeightFormat
from mpjax.kernels.grid import Grid, fit
from mpjax.kernels.plain_codes import in_groups
from mpjax.quantization.statistics import squared_error

STEPS, RATE = 200, 1e-2
FIRST_LOGIT = 4.0  # the initial factor is sigmoid(4) = 0.982


def learn_ranges(
    weight: jax.Array,
    hessian: jax.Array,
    format: WeightFormat,
    *,
    steps: int = STEPS,
    rate: float = RATE,
) -> Grid:
    """The grid with the least output error of all steps of a gradient descent.

    weight: float32 [K, N]. hessian: float32 [K, K], the mean of x xᵀ over inputs.

    A group's range is from sigmoid(a) · min to sigmoid(b) · max, with learned logits a and b. Since
    rounding has no useful gradient, each step chooses codes, holds them constant, and
    differentiates their values with respect to a and b. Raises ValueError if optax is not
    installed.
    """
    return _descend(_optimizer(rate), weight, hessian, format, steps)


@functools.cache  # `_descend` is compiled for each object: keep one per rate
def _optimizer(rate: float) -> Any:
    return require_optax().adam(rate)


def require_optax(step: str = "clip") -> Any:
    """The module optax. Raises ValueError, with a remedy, if it is not installed.

    step: the method step that needs it.
    """
    try:
        import optax
    except ImportError as error:
        raise ValueError(
            f"the method {step} needs optax: pip install optax, or choose another method"
        ) from error
    return optax


@functools.partial(jax.jit, static_argnames=("optimizer", "format", "steps"))
def _descend(
    optimizer: Any, weight: jax.Array, hessian: jax.Array, format: WeightFormat, steps: int
) -> Grid:
    groups = in_groups(weight, format)
    low, high = jnp.minimum(groups.min(1), 0.0), jnp.maximum(groups.max(1), 0.0)

    def grid_of(logits: jax.Array) -> Grid:
        least, most = jax.nn.sigmoid(logits[0]) * low, jax.nn.sigmoid(logits[1]) * high
        cut = jnp.clip(groups, least[:, None], most[:, None])
        return fit(cut.reshape(-1, weight.shape[1])[: len(weight)], format)

    def loss(logits: jax.Array) -> tuple[jax.Array, Grid]:
        grid = grid_of(logits)
        held = jax.lax.stop_gradient(grid.round(weight).codes)
        difference = grid.with_codes(held).dequantize() - weight
        return squared_error(difference, hessian).sum(), grid

    def step(state: Any, _: None) -> tuple[Any, None]:
        logits, moments, best, least = state
        (found, grid), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
        is_better = found < least
        best = jax.tree.map(functools.partial(jnp.where, is_better), grid, best)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
            updates, moments = optimizer.update(gradient, moments)
        return (logits + updates, moments, best, jnp.minimum(found, least)), None

    whole = fit(weight, format)
    least = squared_error(whole.round(weight).dequantize() - weight, hessian).sum()
    logits = jnp.full((2, *low.shape), FIRST_LOGIT)
    start = logits, optimizer.init(logits), whole, least
    (_, _, best, _), _ = jax.lax.scan(step, start, None, length=steps)
    return best
