"""The blocks of W4Ax: the order of a linear map's channels, and which blocks take 8 bits.

Liu et al., "COMET: Towards Practical W4A4KV4 LLMs Serving" (2025), §3.2: activations have outliers
in few channels, the same for all tokens. A permutation puts channels of like magnitude together, so
that outliers fill few blocks of 128 channels; these keep 8 bits, and the others have 4. The paper
names no threshold. Here all channels are sorted by their mean squares, and blocks take 8 bits in
the order of the error of outputs that this removes, until a share of blocks or an error is reached.
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
    """How many blocks of a linear map's activations take 8 bits, and in which order channels lie.

    one_in: one block in so many has 8 bits, of all linear maps of a layer with such a rule
        together, rounded, at least one; 0 for none.
    error: instead of `one_in`, the largest squared error of each map's outputs, relative to
        their squares, that rounding activations may cause; blocks take 8 bits until it is reached,
        or all have them.
    is_ordered: whether channels are sorted; for comparisons, False keeps their order.

    Raises ValueError for anything but such numbers.
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
        """Whether blocks differ, so that statistics must choose them."""
        return self.error is not None or self.one_in > 1


def is_folded(fold: Fold) -> bool:
    """Whether the channels that a fold's target reads move in its source, and not in kernels.

    Channels of heads move within their head, where that has whole blocks. Attention then rounds its
    outputs itself. A block of several smaller heads would be the same in any such order.
    """
    if fold.repeats is None or not fold.is_mixable:
        return fold.is_elementwise
    return fold.repeats[2] % BLOCK == 0


def in_order(statistics: Statistics, fold: Fold | None = None) -> tuple[jax.Array, Statistics]:
    """An order of channels, and the statistics of channels in it.

    Those of a stack of experts have a leading axis of experts, and so has the order then.

    fold: the folded one whose target the statistics are of; None for an order of all channels.
    """
    if statistics.tokens.ndim:
        return jax.vmap(in_order)(statistics)
    if fold is None or fold.repeats is None:
        order = order_of(statistics)
    else:
        order = order_in_heads(statistics, fold.repeats)
    return order, permuted(statistics, order)


def order_in_heads(statistics: Statistics, repeats: tuple[int, int, int]) -> jax.Array:
    """The permutation int32 [K] that sorts the channels of each head, and alike of its copies.

    repeats: heads, copies and channels, as in Fold. A channel counts by all of its copies.
    """
    heads, copies, channels = repeats
    squares = jnp.diagonal(statistics.hessian).reshape(repeats).sum(1)
    own = jnp.argsort(-squares, axis=-1, stable=True).astype(jnp.int32)
    firsts = jnp.arange(heads * copies, dtype=jnp.int32).reshape(heads, copies, 1) * channels
    return (firsts + own[:, None]).reshape(-1)


def order_of(statistics: Statistics) -> jax.Array:
    """The permutation int32 [K] that sorts channels by the mean squares of inputs, largest first.

    A block's scale follows the largest magnitude in it: blocks of like channels lose least.
    Channels of which no token tells anything keep their order.
    """
    return jnp.argsort(-jnp.diagonal(statistics.hessian), stable=True).astype(jnp.int32)


def permuted(statistics: Statistics, order: jax.Array) -> Statistics:
    """The statistics of inputs whose channel i is channel order[i]."""
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
    """The error of outputs that each block of activations causes in 4 and in 8 bits.

    weight: float32 [K, N], as it will be multiplied, in the order of the statistics' channels.

    Returns float32 [2, blocks]: mean squared errors over `statistics.samples`, relative to the mean
    squares of outputs. The errors of blocks are independent, so that they add up. They are NaN if
    the text has no token for the map, as may be for an expert.
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

    Each expert is a map of its own. Blocks whose errors are NaN have 8 bits, as nothing is known of
    them, and the share does not count them.

    rules, errors: by the maps' paths; errors as `block_errors` returns them, of a stack
        [2, experts, blocks].
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
    """The fewest blocks that, with 8 bits, keep the sum of errors [2, blocks] within a limit."""
    gains = errors[0] - errors[1]
    order = np.argsort(-gains, kind="stable")
    left = errors[0].sum() - np.concatenate([[0.0], np.cumsum(gains[order])])
    is_within = np.flatnonzero(left <= limit)
    return order[: is_within[0]] if len(is_within) else order
