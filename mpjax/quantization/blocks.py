"""The activation blocks of W4Ax: the order of channels, and which blocks have 8 bits.

Liu et al., "COMET: Towards Practical W4A4KV4 LLMs Serving" (2025), §3.2: activations have outliers
in a few channels, the same for all tokens. A permutation puts channels of similar magnitude
together, so that outliers fill few blocks of 128 channels; these have 8 bits, and the others 4. The
paper gives no threshold. Here all channels are sorted by mean square, and blocks get 8 bits in
order of the output error that this removes, until a fraction of blocks or an error bound is
reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.activation_widths import blocks_of_share
from mpjax.kernels import ActivationBlocks, quantize_activations
from mpjax.kernels.activation_blocks import BLOCK, WIDTHS
from mpjax.kernels.checks import shown
from mpjax.models.maps import Fold
from mpjax.precision import DEFAULT_WIDE_BLOCKS
from mpjax.quantization.statistics import PRECISION, Statistics


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """How many blocks of a linear map's activations have 8 bits, and whether channels are sorted.

    one_in: one in `one_in` blocks has 8 bits, counted over all linear maps of a layer with such a
        rule, rounded, at least one block; 0 for none.
    error: instead of `one_in`, a bound of each map's relative squared output error by rounding
        activations; blocks get 8 bits until it is met, or all have 8.
    is_ordered: whether channels are sorted; False is for comparisons.

    Raises ValueError for other values.
    """

    one_in: int = DEFAULT_WIDE_BLOCKS
    error: float | None = None
    is_ordered: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.one_in, int) or self.one_in < 0:
            raise ValueError(f"one_in is {shown(self.one_in)}: expected 0 or more")
        error = self.error
        is_number = isinstance(error, int | float) and not isinstance(error, bool)
        if error is not None and not (is_number and error > 0):
            raise ValueError(f"error is {shown(error)}: expected a number above 0")

    @property
    def needs_text(self) -> bool:
        """Whether blocks have different widths, which statistics must choose."""
        return self.error is not None or self.one_in > 1


def is_folded(fold: Fold) -> bool:
    """Whether the order of a fold target's input channels is folded into the source's outputs.

    Channels of heads are reordered within the head if a head has whole blocks; attention then
    rounds its outputs itself. With smaller heads, such an order would not change a block's
    channels.
    """
    if fold.repeats is None or not fold.is_mixable:
        return fold.is_elementwise
    return fold.repeats[2] % BLOCK == 0


def in_order(statistics: Statistics, fold: Fold | None = None) -> tuple[jax.Array, Statistics]:
    """The order of channels, and the statistics in that order.

    Both have a leading axis of experts for a stack of experts. fold: the fold whose target has
    these statistics, to sort within heads; None to sort all channels.
    """
    if statistics.tokens.ndim:
        return jax.vmap(in_order)(statistics)
    if fold is None or fold.repeats is None:
        order = order_of(statistics)
    else:
        order = order_in_heads(statistics, fold.repeats)
    return order, permuted(statistics, order)


def order_in_heads(statistics: Statistics, repeats: tuple[int, int, int]) -> jax.Array:
    """The permutation int32 [K] that sorts the channels of each head, equally in all its copies.

    repeats: (heads, copies, channels) as in Fold. The squares of a channel's copies are added.
    """
    heads, copies, channels = repeats
    squares = jnp.diagonal(statistics.hessian).reshape(repeats).sum(1)
    own = jnp.argsort(-squares, axis=-1, stable=True).astype(jnp.int32)
    firsts = jnp.arange(heads * copies, dtype=jnp.int32).reshape(heads, copies, 1) * channels
    return (firsts + own[:, None]).reshape(-1)


def order_of(statistics: Statistics) -> jax.Array:
    """The permutation int32 [K] that sorts channels by the inputs' mean square, largest first.

    A block's scale follows its largest magnitude, so blocks of similar channels lose least.
    Channels without inputs keep their order.
    """
    return jnp.argsort(-jnp.diagonal(statistics.hessian), stable=True).astype(jnp.int32)


def permuted(statistics: Statistics, order: jax.Array) -> Statistics:
    """The statistics with channels permuted: channel i of the result is channel order[i]."""
    return dataclasses.replace(
        statistics,
        products=statistics.products[order][:, order],
        magnitudes=statistics.magnitudes[order],
        largest=statistics.largest[order],
        smallest=statistics.smallest[order],
        samples=statistics.samples[:, order],
    )


@jax.jit
def block_errors(weight: jax.Array, statistics: Statistics) -> jax.Array:
    """The output error that each block of activations causes in 4 and in 8 bits.

    weight: float32 [K, N], the quantised weight, in the channel order of the statistics. Returns
    float32 [2, blocks]: mean squared errors over `statistics.samples`, relative to the outputs'
    mean square. Errors of blocks are independent, so they add up. They are NaN if the map has no
    inputs, which can happen for an expert.
    """
    x = statistics.samples
    size = (jnp.matmul(x, weight, precision=PRECISION) ** 2).sum()
    count = -(-x.shape[1] // BLOCK)
    missing = count * BLOCK - x.shape[1]
    rows = jnp.pad(weight, ((0, missing), (0, 0))).reshape(count, BLOCK, -1)

    def errors(bits: int) -> jax.Array:
        blocks = ActivationBlocks(jnp.full(count, bits, jnp.uint8))
        lost = quantize_activations(x, blocks).dequantize() - x
        parts = jnp.pad(lost, ((0, 0), (0, missing))).reshape(len(x), count, BLOCK)
        return jax.lax.map(
            lambda part: (jnp.matmul(*part, precision=PRECISION) ** 2).sum(),
            (parts.swapaxes(0, 1), rows),
        )

    found = jnp.stack([errors(bits) for bits in WIDTHS]) / jnp.maximum(size, 1e-30)
    return jnp.where(statistics.tokens > 0, found, jnp.nan)


def choose_widths(
    rules: Mapping[str, BlockRule], errors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The bits uint8 [blocks], or [experts, blocks], of the activations of a layer's linear maps.

    Each expert counts as a map. Blocks with NaN errors get 8 bits and aren't counted.

    rules, errors: by the maps' paths; errors as `block_errors` returns them, [2, experts, blocks]
        for a stack.
    """
    widths = {
        path: np.where(np.isnan(found[0]), *WIDTHS[::-1]).astype(np.uint8)
        for path, found in errors.items()
    }
    pooled = [path for path in errors if rules[path].error is None and rules[path].one_in]
    budget, gains = Fraction(0), []
    for path in pooled:
        found = errors[path][0] - errors[path][1]
        known = np.argwhere(~np.isnan(found))
        budget += Fraction(len(known), rules[path].one_in)
        gains += [(found[tuple(block)], path, tuple(block)) for block in known]
    most = blocks_of_share(budget) if gains else 0
    for _, path, block in sorted(gains, key=lambda each: -each[0])[:most]:
        widths[path][block] = WIDTHS[1]
    for path, found in errors.items():
        if (limit := rules[path].error) is not None:
            for expert in np.ndindex(found.shape[1:-1]):
                widths[path][expert][_within(found[:, *expert], limit)] = WIDTHS[1]
    return widths


def _within(errors: np.ndarray, limit: float) -> np.ndarray:
    """The fewest blocks that need 8 bits to keep the summed error within a limit.

    errors: [2, blocks], in 4 and in 8 bits.
    """
    gains = errors[0] - errors[1]
    order = np.argsort(-gains, kind="stable")
    left = errors[0].sum() - np.concatenate([[0.0], np.cumsum(gains[order])])
    is_within = np.flatnonzero(left <= limit)
    return order[: is_within[0]] if len(is_within) else order
