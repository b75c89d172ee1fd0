"""Scales of input channels that move magnitude between activations and weights.

A fold divides the inputs of a linear map by scales s [K] and multiplies its rows by them. The
outputs stay the same, but the error of rounding changes. AWQ enlarges the rows of large inputs, so
that they are rounded more finely than the other rows of their group. SmoothQuant and Outlier
Suppression+ are for formats that round activations too, and make large inputs smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels import WeightFormat, quantize_activations
from mpjax.kernels.grid import fit
from mpjax.kernels.plain_codes import in_groups
from mpjax.models.maps import Fold
from mpjax.quantization.folds import tie
from mpjax.quantization.statistics import PRECISION, Statistics, squared_error

AWQ_STEPS = 20
ALPHAS = tuple(alpha / 20 for alpha in range(1, 20))
THRESHOLDS = 40
LEAST_SCALE = 1e-4


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "statistics"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class Reader:
    """A weight whose inputs are scaled, the statistics of these, and its format; a pytree.

    weight: float32 [K, N], of linear maps side by side; or [experts, K, N] of a stack of experts,
        whose statistics have the leading axis, too. Experts share the scales of their inputs.
    """

    weight: jax.Array
    statistics: Statistics
    format: WeightFormat

    def error(self, of_one: Loss, scales: jax.Array) -> jax.Array:
        """The sum of squared errors of outputs over all inputs, if operands are scaled by [K]."""

        def weighed(weight: jax.Array, statistics: Statistics) -> jax.Array:
            return of_one(weight, statistics, self.format, scales) * statistics.tokens

        if self.weight.ndim == 2:
            return weighed(self.weight, self.statistics)
        return jax.lax.map(lambda one: weighed(*one), (self.weight, self.statistics)).sum()


# From a weight [K, N], statistics, a format and scales [K] to the mean squared error of outputs.
Loss = Callable[[jax.Array, Statistics, WeightFormat, jax.Array], jax.Array]


@functools.partial(jax.jit, static_argnames="fold")
def awq_scales(*readers: Reader, fold: Fold | None = None) -> jax.Array:
    """The scales [K] of AWQ's grid with the least error of outputs (Lin et al. 2023, §3.2).

    readers: all that reads the inputs and is rounded.
    fold: where the scales move; rows that read copies of one channel get one scale.

    Candidates are ones, x̄**r, and x̄**r / w̄**(1 − r), for r in 0, 0.05 … 1. x̄ [K] is the mean of
    |x|. w̄ [K] is the mean over output channels of |w| / (the largest |w| of its group). Each
    candidate is divided by the geometric mean of its largest and its smallest scale.
    """
    tokens = sum(reader.statistics.tokens.sum() for reader in readers)
    magnitudes = sum(_over_experts(reader.statistics.magnitudes).sum(0) for reader in readers)
    inputs = magnitudes / jnp.maximum(tokens, 1.0)
    weights = jnp.concatenate([_shares_of_groups(reader) for reader in readers], 1).mean(1)
    powers = jnp.linspace(0.0, 1.0, AWQ_STEPS + 1)[:, None]
    plain = inputs[None] ** powers
    both = plain / (weights[None] ** (1 - powers) + 1e-4)
    candidates = jnp.concatenate([jnp.ones_like(inputs)[None], plain[1:], both])
    return best_scales(candidates, _loss(_weight_error, readers), fold)


@functools.partial(jax.jit, static_argnames=("fold", "alphas"))
def smooth_scales(
    *readers: Reader, fold: Fold | None = None, alphas: Sequence[float] = ALPHAS
) -> jax.Array:
    """The scales [K] of SmoothQuant's rule (Xiao et al. 2022, eq. 4), with the best of some α.

    s = max|x|**α / max|w|**(1 − α). readers, fold: as in `awq_scales`.
    """
    inputs = _largest_inputs(readers)[None]
    weights = jnp.stack(
        [_over_experts(jnp.abs(reader.weight).max(-1)).max(0) for reader in readers]
    ).max(0, keepdims=True)
    alpha = jnp.asarray(alphas, jnp.float32)[:, None]
    candidates = jnp.maximum(inputs, 1e-5) ** alpha / jnp.maximum(weights, 1e-5) ** (1 - alpha)
    candidates = jnp.concatenate([jnp.ones_like(inputs), candidates])
    return best_scales(candidates, _loss(deployed_error, readers), fold)


@functools.partial(jax.jit, static_argnames=("fold", "steps"))
def threshold_scales(
    *readers: Reader, fold: Fold | None = None, steps: int = THRESHOLDS
) -> jax.Array:
    """The scales [K] of Outlier Suppression+ (Wei et al. 2023, §4.2), as LiquidGEMM uses it (§6).

    All inputs have one threshold t. s = max(1, max x / t, −min x / t), so that only channels whose
    inputs exceed t are scaled. t falls from the largest magnitude in `steps` equal steps, and the
    best t is taken. readers, fold: as in `awq_scales`.
    """
    ranges = _largest_inputs(readers)
    thresholds = ranges.max() * jnp.linspace(1.0, 1 / steps, steps)
    candidates = ranges[None] / jnp.maximum(thresholds, LEAST_SCALE)[:, None]
    candidates = jnp.maximum(candidates, 1.0)
    return best_scales(candidates, _loss(deployed_error, readers), fold, is_centred=False)


@functools.partial(jax.jit, static_argnames="scaling")
def of_each_expert(scaling: Callable[..., jax.Array], reader: Reader) -> jax.Array:
    """The scales [experts, K] of a stack of experts each of which has scales of its own.

    scaling: one of the functions above. An expert without inputs gets ones.
    """
    format = reader.format
    return jax.lax.map(
        lambda one: scaling(Reader(one[0], one[1], format)), (reader.weight, reader.statistics)
    )


def best_scales(
    candidates: jax.Array,
    loss: Callable[[jax.Array], jax.Array],
    fold: Fold | None = None,
    *,
    is_centred: bool = True,
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


def _loss(of_one: Loss, readers: Sequence[Reader]) -> Callable[[jax.Array], jax.Array]:
    """The function from scales [K] to the error of all readers, in the mean over the inputs."""
    tokens = jnp.maximum(sum(reader.statistics.tokens.sum() for reader in readers), 1.0)
    return lambda scales: sum(reader.error(of_one, scales) for reader in readers) / tokens


def _largest_inputs(readers: Sequence[Reader]) -> jax.Array:
    """The largest |x| that any reader has read, float32 [K]."""
    found = [_over_experts(reader.statistics.largest_magnitude).max(0) for reader in readers]
    return jnp.stack(found).max(0)


def _shares_of_groups(reader: Reader) -> jax.Array:
    """|w| of each weight over the largest of its group, float32 [K, experts · N]."""
    weight = reader.weight
    if weight.ndim == 3:  # groups are of input channels, so that experts are more outputs
        weight = jnp.moveaxis(weight, 0, 1).reshape(weight.shape[1], -1)
    groups = in_groups(jnp.abs(weight), reader.format)
    shares = groups / (groups.max(1, keepdims=True) + 1e-6)
    return shares.reshape(-1, weight.shape[1])[: len(weight)]


def _over_experts(values: jax.Array) -> jax.Array:
    """Values [experts, K] of a stack, or [1, K]."""
    return values.reshape(-1, values.shape[-1])


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

    weight: float32 [K, N]. scales: float32 [K], by which the weight's rows are multiplied, and
    activations divided. Returns a float32 scalar.

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
