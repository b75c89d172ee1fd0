"""Range search: the share of each group's range with which rounding changes the outputs least.

With the whole range, the largest weight of a group decides the scale of all. With a smaller range,
that weight is cut, and the others are rounded more finely. AWQ (Lin et al. 2023, §4) and
llama.cpp's importance matrices choose a range by the error of outputs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import WeightFormat
from mpjax.kernels.grid import Grid, fit
from mpjax.kernels.plain_codes import in_groups

# The shares of a group's range that are tried. With two bits, the best is as small as a third.
RATIOS = tuple(float(ratio) for ratio in np.linspace(1.0, 0.3, 36))
PRECISION = jax.lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnames=("format", "ratios"))
def search_ranges(
    weight: jax.Array,
    importance: jax.Array,
    format: WeightFormat,
    *,
    table: jax.Array | None = None,
    ratios: tuple[float, ...] = RATIOS,
) -> Grid:
    """Fits a grid to the share of each group's range that has the least error of outputs.

    weight: float32 [K, N].
    importance: float32 [K], the mean squares of the inputs; or [K, K], the mean of x xᵀ, of which
        only pairs of inputs in one group count.
    table: of `table…` formats; None for normal float.
    ratios: the shares to try. The whole range is compared as well, so that no output channel (with
        FP8, no block of channels that share scales) has a larger error than with `fit`.
    """
    groups = in_groups(weight, format)
    weights = _by_group(importance, groups.shape[:2])

    def errors(grid: Grid) -> jax.Array:
        difference = in_groups(grid.round(weight).dequantize(), format) - groups
        return _of_shared_scales(_errors(difference, weights), format)

    def attempt(
        best: tuple[jax.Array, jax.Array], ratio: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        least, chosen = best
        shares = jnp.full(least.shape, ratio)
        found = errors(fit(_clip(weight, groups, shares), format, table))
        better = found < least
        return (jnp.where(better, found, least), jnp.where(better, shares, chosen)), None

    whole = errors(fit(weight, format, table))
    start = whole, jnp.ones_like(whole)
    (_, chosen), _ = jax.lax.scan(attempt, start, jnp.asarray(ratios, jnp.float32))
    # The scan gave all groups one share. Groups that depend on each other, as liquid4's do through
    # the scale of their channel, may be worse with their chosen shares than with the whole range.
    found = errors(fit(_clip(weight, groups, chosen), format, table))
    is_worse = found.sum(0) > whole.sum(0)
    chosen = jnp.where(is_worse[None], 1.0, chosen)
    return fit(_clip(weight, groups, chosen), format, table)


def _clip(weight: jax.Array, groups: jax.Array, shares: jax.Array) -> jax.Array:
    """The weight [K, N], cut to shares [groups, N] of each group's range, which includes zero.

    groups: the weight as [groups, size, N].
    """
    low = jnp.minimum(groups.min(1), 0.0) * shares
    high = jnp.maximum(groups.max(1), 0.0) * shares
    return jnp.clip(groups, low[:, None], high[:, None]).reshape(-1, weight.shape[1])[: len(weight)]


def _by_group(importance: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The importance as [groups, size], or [groups, size, size] of pairs; zero for padding."""
    count, size = shape
    missing = count * size - len(importance)
    if importance.ndim == 1:
        return jnp.pad(importance, (0, missing)).reshape(count, size)
    square = jnp.pad(importance, ((0, missing), (0, missing)))
    square = square.reshape(count, size, count, size)
    return square[jnp.arange(count), :, jnp.arange(count)]


def _of_shared_scales(errors: jax.Array, format: WeightFormat) -> jax.Array:
    """Errors [groups, N]; with FP8, each is the sum over the output channels that share a scale."""
    if format.codes != "float8" or format.group_size is None:
        return errors
    groups, outputs = errors.shape
    tiles = jnp.pad(errors, ((0, 0), (0, -outputs % format.group_size)))
    tiles = tiles.reshape(groups, -1, format.group_size).sum(2)
    return jnp.repeat(tiles, format.group_size, axis=1)[:, :outputs]


def _errors(difference: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean squared error [groups, N] that each group causes in an output.

    difference: [groups, size, N], between two weights. weights: from `_by_group`.
    """
    if weights.ndim == 2:
        return (weights[..., None] * difference**2).sum(1)
    product = jnp.einsum("gij,gjn->gin", weights, difference, precision=PRECISION)
    return (difference * product).sum(1)
