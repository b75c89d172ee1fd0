"""Range search: the clipping ratio of each group with the least output error.

With the whole range, the largest weight of a group determines the scale. With a smaller range, that
weight is clipped, and the others are rounded more finely. AWQ (Lin et al. 2023, §4) and llama.cpp's
importance matrices choose the range by the output error.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import WeightFormat
from mpjax.kernels.grid import Grid, fit
from mpjax.kernels.plain_codes import in_groups

# The clipping ratios to try. With 2 bits, the best can be as small as a third.
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
    """Fits a grid with the clipping ratio of each group that has the least output error.

    weight: float32 [K, N].
    importance: float32 [K], the mean squares of the inputs; or [K, K], the mean of x xᵀ, of which
        only the blocks of single groups are used.
    table: of `table…` formats; None for normal float. ratios: the clipping ratios to try. The whole
    range is always compared, so no output channel (with FP8, no block of channels that share
    scales) has a larger error than with `fit`.
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
    # The scan used one ratio for all groups. If groups depend on each other, as in liquid4 through
    # the channel's scale, the chosen ratios together may be worse than the whole range.
    found = errors(fit(_clip(weight, groups, chosen), format, table))
    is_worse = found.sum(0) > whole.sum(0)
    chosen = jnp.where(is_worse[None], 1.0, chosen)
    return fit(_clip(weight, groups, chosen), format, table)


def _clip(weight: jax.Array, groups: jax.Array, shares: jax.Array) -> jax.Array:
    """The weight [K, N], clipped to ratios [groups, N] of each group's range (including zero).

    groups: the weight as [groups, size, N].
    """
    low = jnp.minimum(groups.min(1), 0.0) * shares
    high = jnp.maximum(groups.max(1), 0.0) * shares
    return jnp.clip(groups, low[:, None], high[:, None]).reshape(-1, weight.shape[1])[: len(weight)]


def _by_group(importance: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The importance by group, [groups, size] or [groups, size, size]; zero for padding."""
    count, size = shape
    missing = count * size - len(importance)
    if importance.ndim == 1:
        return jnp.pad(importance, (0, missing)).reshape(count, size)
    square = jnp.pad(importance, ((0, missing), (0, missing)))
    square = square.reshape(count, size, count, size)
    return square[jnp.arange(count), :, jnp.arange(count)]


def _of_shared_scales(errors: jax.Array, format: WeightFormat) -> jax.Array:
    """Errors [groups, N]; with FP8, summed over the output channels that share a scale."""
    if format.codes != "float8" or format.group_size is None:
        return errors
    groups, outputs = errors.shape
    tiles = jnp.pad(errors, ((0, 0), (0, -outputs % format.group_size)))
    tiles = tiles.reshape(groups, -1, format.group_size).sum(2)
    return jnp.repeat(tiles, format.group_size, axis=1)[:, :outputs]


def _errors(difference: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean squared error [groups, N] that each group causes in an output.

    difference: [groups, size, N], of two weights. weights: from `_by_group`.
    """
    if weights.ndim == 2:
        return (weights[..., None] * difference**2).sum(1)
    product = jnp.einsum("gij,gjn->gin", weights, difference, precision=PRECISION)
    return (difference * product).sum(1)
