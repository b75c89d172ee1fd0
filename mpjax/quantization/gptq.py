"""GPTQ: rounds a weight row by row, and lets later rows make up for the error of earlier ones.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022). Rows with the largest inputs are rounded first (act-order). Groups are nevertheless runs of
neighbouring rows, so that the result needs no permutation: with scales that are chosen before
(static groups), or with groups that stay together in the order (group-aware), whose scales are
chosen when they are reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.codes.base import Parameters
from mpjax.kernels.grid import Grid
from mpjax.quantization.ranges import search_ranges

BLOCK = 128  # rows between two updates of all later rows
DAMPING = 0.01
# Each attempt to factor a Hessian adds ten times the damping of the one before.
ATTEMPTS = 4
PRECISION = jax.lax.Precision.HIGHEST

# From a row float32 [N] and its place in a block to its codes [N] and their values float32 [N].
Nearest = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# From the rows of a block, as they are when it is reached, and the index of the first, to the
# function that finds their codes, and a pytree that the block leaves behind.
Begin = Callable[[jax.Array, jax.Array], tuple[Nearest, Any]]


class Compensated(NamedTuple):
    """The codes that GPTQ chose.

    damping: float32 [], the damping with which the Hessian had a Cholesky factor; NaN if it had
        none in any attempt, and then codes are rounded to nearest.
    """

    plain: PlainCodes
    damping: jax.Array


@functools.partial(jax.jit, static_argnames="is_ordered")
def gptq(
    weight: jax.Array,
    hessian: jax.Array,
    grid: Grid,
    *,
    damping: float = DAMPING,
    is_ordered: bool = True,
) -> Compensated:
    """Rounds a weight to a grid so that the products of its inputs change least.

    weight: float32 [K, N]. hessian: float32 [K, K], the mean of x xᵀ over inputs x, times any
    factor. grid: the scales and zero points of all groups, which stay as they are.
    damping: this share of the mean of the Hessian's diagonal is added to each of its elements.
    is_ordered: whether rows are rounded in the order of their diagonal elements of the Hessian, the
        largest first; otherwise from the first to the last.

    A row whose input is always zero is rounded to nearest.
    """
    channels = weight.shape[0]
    order = jnp.argsort(-jnp.diagonal(hessian)) if is_ordered else jnp.arange(channels)
    factor, used = inverse_factor(hessian[order][:, order], damping)
    groups = grid.group_of(jnp.arange(channels))[order]

    def begin(rows: jax.Array, first: jax.Array) -> tuple[Nearest, None]:
        def nearest(row: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = grid.row(groups[jnp.minimum(first + index, channels - 1)])
            codes = at.nearest(row)
            return codes, at.decode(codes)

        return nearest, None

    codes, _ = _compensate(weight[order], factor, BLOCK, begin)
    return Compensated(grid.with_codes(jnp.zeros_like(codes).at[order].set(codes)), used)


@functools.partial(jax.jit, static_argnames=("format", "is_ordered"))
def gptq_fresh(
    weight: jax.Array,
    hessian: jax.Array,
    format: WeightFormat,
    *,
    damping: float = DAMPING,
    is_ordered: bool = True,
) -> Compensated:
    """GPTQ whose scales of a group are found when its rows are reached, from what these are then.

    weight, hessian, damping: as in `gptq`. format: with groups; see `why_not_fresh`.
    is_ordered: takes groups in the order of their largest diagonal of the Hessian, and the rows of
        a group in that of theirs (GPTQModel's group-aware order); else rows in their own.

    A group's ranges are searched with the Hessian's diagonal as importance.
    """
    channels, size = len(weight), format.group_size or len(weight)
    diagonal = jnp.diagonal(hessian)
    groups, order = jnp.arange(channels // size), jnp.arange(channels)
    if is_ordered:
        importance = diagonal.reshape(-1, size)
        groups = jnp.argsort(-importance.max(1))
        inside = jnp.argsort(-importance, axis=1)
        order = (groups[:, None] * size + inside[groups]).reshape(-1)
    factor, used = inverse_factor(hessian[order][:, order], damping)
    diagonal = diagonal[order]

    def begin(rows: jax.Array, first: jax.Array) -> tuple[Nearest, Parameters]:
        importance = jax.lax.dynamic_slice(diagonal, (first,), (size,))
        grid = search_ranges(rows, importance, format)
        at = grid.row(0)

        def nearest(row: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            codes = at.nearest(row)
            return codes, at.decode(codes)

        return nearest, grid.parameters

    codes, found = _compensate(weight[order], factor, size, begin)

    def placed(values: jax.Array | None) -> jax.Array | None:
        """Values [groups, 1, N] of groups in their order, at the groups' places."""
        return None if values is None else jnp.zeros_like(values[:, 0]).at[groups].set(values[:, 0])

    table = None if found.table is None else found.table[0]
    scales = placed(found.scales)
    assert scales is not None
    parameters = Parameters(scales, placed(found.zeros), None, table)
    grid = Grid(format, channels, parameters)
    return Compensated(grid.with_codes(jnp.zeros_like(codes).at[order].set(codes)), used)


def why_not_fresh(format: WeightFormat) -> str | None:
    """Why a format has no groups whose scales are independent of each other, or None."""
    kind = code_kinds.of(format)
    if kind.has_channel_scales or format.codes == "float8":
        return f"the groups of {format} share scales"
    return None


def _compensate(
    weight: jax.Array, factor: jax.Array, size: int, begin: Begin
) -> tuple[jax.Array, Any]:
    """Rounds rows in turn; returns codes [K, N], and what blocks of rows leave behind, stacked.

    weight: [K, N], with its rows in the order of rounding. factor: upper triangular [K, K], from
    `inverse_factor`. The error of a row corrects the rest of its block of `size` rows at once; all
    rows after the block are corrected by one product when the block is done.
    """
    channels, outputs = weight.shape
    missing = -channels % size
    weight = jnp.pad(weight, ((0, missing), (0, 0)))
    factor = jnp.pad(factor, ((0, missing), (0, missing)))
    factor += jnp.diag((jnp.arange(len(factor)) >= channels).astype(factor.dtype))

    def block(weight: jax.Array, first: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        rows = jax.lax.dynamic_slice(weight, (first, 0), (size, outputs))
        from_here = jax.lax.dynamic_slice(factor, (first, 0), (size, len(factor)))
        within = jax.lax.dynamic_slice(from_here, (0, first), (size, size))
        nearest, left = begin(rows, first)

        def row(rows: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            codes, values = nearest(rows[index], index)
            error = (rows[index] - values) / within[index, index]
            later = jnp.where(jnp.arange(size) > index, within[index], 0.0)
            return rows - later[:, None] * error[None], (codes, error)

        _, (codes, errors) = jax.lax.scan(row, rows, jnp.arange(size))
        weight -= jnp.matmul(from_here.T, errors, precision=PRECISION)
        return weight, (codes, left)

    _, (codes, left) = jax.lax.scan(block, weight, jnp.arange(0, len(weight), size))
    return codes.reshape(-1, outputs)[:channels], left


def inverse_factor(hessian: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """The upper triangular U with Uᵀ U = H⁻¹, and the damping that H needed to have one.

    Let L be the Cholesky factor of H with its rows and columns in reverse order. L in reverse order
    is an upper triangular R with H = R Rᵀ, so that U = R⁻¹. This takes one factorisation, and never
    inverts H. If all attempts fail, U is the identity and the damping NaN.

    hessian: float32 [K, K]. damping: as for `gptq`. Returns U float32 [K, K], and that damping, a
    float32 scalar.
    """
    diagonal = jnp.diagonal(hessian)
    size = jnp.maximum(diagonal.mean(), jnp.finfo(jnp.float32).tiny)
    identity = jnp.eye(len(hessian), dtype=hessian.dtype)
    # With a damping of zero, an input channel that is always zero would leave H without a factor.
    lifted = hessian + jnp.diag(jnp.where(diagonal == 0, size, 0.0))

    def attempt(damping: jax.Array) -> jax.Array:
        reversed_ = jnp.flip(lifted + damping * size * identity)
        return jnp.flip(jnp.linalg.cholesky(reversed_))

    def is_unsolved(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, root, attempts = state
        return ~jnp.isfinite(root).all() & (attempts < ATTEMPTS)

    def again(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        damping, _, attempts = state
        return 10 * damping, attempt(10 * damping), attempts + 1

    first = jnp.float32(damping)
    used, root, _ = jax.lax.while_loop(is_unsolved, again, (first, attempt(first), jnp.int32(1)))
    inverse = jax.scipy.linalg.solve_triangular(root, identity)
    is_found = jnp.isfinite(inverse).all()
    return jnp.where(is_found, inverse, identity), jnp.where(is_found, used, jnp.nan)
