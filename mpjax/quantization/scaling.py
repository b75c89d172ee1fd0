"""Scales of input channels that move magnitude between activations and weights.

A fold divides the inputs of a linear map by scales s [K] and multiplies its rows by them. The
outputs stay the same, but the error of rounding changes. AWQ enlarges the rows of large inputs, so
that they are rounded more finely than the other rows of their group. SmoothQuant and Outlier
Suppression+ are for formats that round activations too, and make large inputs smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels import WeightFormat, quantize_activations
from mpjax.kernels.grid import fit
from mpjax.kernels.plain_codes import in_groups
from mpjax.models.config import Fold
from mpjax.quantization.folds import tie
from mpjax.quantization.statistics import PRECISION, Statistics, squared_error

AWQ_STEPS = 20
ALPHAS = tuple(alpha / 20 for alpha in range(1, 20))
THRESHOLDS = 40
LEAST_SCALE = 1e-4

# A function from scales [K] to the error of outputs, if operands are scaled and then rounded.
Loss = Callable[[jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnames=("format", "fold"))
def awq_scales(
    weight: jax.Array, statistics: Statistics, format: WeightFormat, *, fold: Fold | None = None
) -> jax.Array:
    """The scales [K] of AWQ's grid with the least error of outputs (Lin et al. 2023, §3.2).

    weight: float32 [K, N], of all linear maps that read the input, side by side.
    fold: where the scales move; rows that read copies of one channel get one scale.

    Candidates are ones, x̄**r, and x̄**r / w̄**(1 − r), for r in 0, 0.05 … 1. x̄ [K] is the mean of
    |x|. w̄ [K] is the mean over output channels of |w| / (the largest |w| of its group). Each
    candidate is divided by the geometric mean of its largest and its smallest scale.
    """
    inputs = statistics.mean_magnitude
    groups = in_groups(jnp.abs(weight), format)
    shares = groups / (groups.max(1, keepdims=True) + 1e-6)
    weights = shares.reshape(-1, weight.shape[1])[: len(weight)].mean(1)
    powers = jnp.linspace(0.0, 1.0, AWQ_STEPS + 1)[:, None]
    plain = inputs[None] ** powers
    both = plain / (weights[None] ** (1 - powers) + 1e-4)
    candidates = jnp.concatenate([jnp.ones_like(inputs)[None], plain[1:], both])
    loss = functools.partial(_weight_error, weight, statistics, format)
    return best_scales(candidates, loss, fold)


@functools.partial(jax.jit, static_argnames=("format", "fold", "alphas"))
def smooth_scales(
    weight: jax.Array,
    statistics: Statistics,
    format: WeightFormat,
    *,
    fold: Fold | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> jax.Array:
    """The scales [K] of SmoothQuant's rule (Xiao et al. 2022, eq. 4), with the best of some α.

    s = max|x|**α / max|w|**(1 − α). weight, statistics, fold: as in `awq_scales`.
    """
    inputs = statistics.largest_magnitude[None]
    weights = jnp.abs(weight).max(1)[None]
    alpha = jnp.asarray(alphas, jnp.float32)[:, None]
    candidates = jnp.maximum(inputs, 1e-5) ** alpha / jnp.maximum(weights, 1e-5) ** (1 - alpha)
    candidates = jnp.concatenate([jnp.ones_like(inputs), candidates])
    loss = functools.partial(deployed_error, weight, statistics, format)
    return best_scales(candidates, loss, fold)


@functools.partial(jax.jit, static_argnames=("format", "fold", "steps"))
def threshold_scales(
    weight: jax.Array,
    statistics: Statistics,
    format: WeightFormat,
    *,
    fold: Fold | None = None,
    steps: int = THRESHOLDS,
) -> jax.Array:
    """The scales [K] of Outlier Suppression+ (Wei et al. 2023, §4.2), as LiquidGEMM uses it (§6).

    All inputs have one threshold t. s = max(1, max x / t, −min x / t), so that only channels whose
    inputs exceed t are scaled. t falls from the largest magnitude in `steps` equal steps, and the
    best t is taken. weight, statistics, fold: as in `awq_scales`.
    """
    ranges = statistics.largest_magnitude
    thresholds = ranges.max() * jnp.linspace(1.0, 1 / steps, steps)
    candidates = ranges[None] / jnp.maximum(thresholds, LEAST_SCALE)[:, None]
    candidates = jnp.maximum(candidates, 1.0)
    loss = functools.partial(deployed_error, weight, statistics, format)
    return best_scales(candidates, loss, fold, is_centred=False)


def best_scales(
    candidates: jax.Array, loss: Loss, fold: Fold | None = None, *, is_centred: bool = True
) -> jax.Array:
    """The scales [K] with the least loss of candidates [count, K].

    fold: as in `awq_scales`. is_centred: whether each candidate is first divided by the geometric
        mean of its largest and its smallest scale.
    """
    candidates = jnp.clip(candidates, LEAST_SCALE, 1 / LEAST_SCALE)
    if fold is not None:
        candidates = jax.vmap(functools.partial(tie, fold))(candidates)
    if is_centred:
        middles = jnp.sqrt(candidates.max(1) * candidates.min(1))
        candidates = candidates / middles[:, None]
    losses = jax.lax.map(loss, candidates)
    return candidates[jnp.argmin(jnp.where(jnp.isfinite(losses), losses, jnp.inf))]


def _weight_error(
    weight: jax.Array, statistics: Statistics, format: WeightFormat, scales: jax.Array
) -> jax.Array:
    """The mean squared error of outputs if only the weight is rounded."""
    scaled = weight * scales[:, None]
    rounded = fit(scaled, format).round(scaled).dequantize() / scales[:, None]
    return squared_error(rounded - weight, statistics.hessian).sum()


def deployed_error(
    weight: jax.Array, statistics: Statistics, format: WeightFormat, scales: jax.Array
) -> jax.Array:
    """The mean squared error of outputs if weights and activations are rounded as in a product.

    It is computed for the inputs `statistics.samples`. If the format has 16-bit activations, only
    the weight is rounded, and the error is that of all inputs.
    """
    if format.operand is None:
        return _weight_error(weight, statistics, format, scales)
    scaled = weight * scales[:, None]
    rounded = fit(scaled, format).round(scaled).dequantize()
    x = statistics.samples
    read = quantize_activations(x / scales[None], format).dequantize()
    exact, found = (
        jnp.matmul(a, b, precision=PRECISION) for a, b in ((x, weight), (read, rounded))
    )
    return ((found - exact) ** 2).sum(1).mean()
