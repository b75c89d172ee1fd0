"""GPTQ: rounds a weight row by row, compensating each row's error in later rows.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022). Rows with the largest inputs are rounded first (act-order). Groups are nevertheless
contiguous rows, so the result needs no permutation: either with scales chosen beforehand (static
groups), or with groups kept together in the order (group-aware), whose scales are chosen when
reached.
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
# Number of Cholesky attempts, each with ten times the damping of the previous one.
ATTEMPTS = 4
PRECISION = jax.lax.Precision.HIGHEST

# (row float32 [N], its index in the block) -> (codes [N], their values float32 [N]).
Nearest = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# begin(rows, first) -> (nearest, extra). rows: the block's weights, corrected for the errors of
# earlier blocks. first: index of the first row. nearest: rounds one row. extra: a pytree that is
# stacked over blocks and returned.
Begin = Callable[[jax.Array, jax.Array], tuple[Nearest, Any]]


class Compensated(NamedTuple):
    """The codes chosen by GPTQ.

    damping: float32 [], the damping for which the Cholesky factorisation succeeded; NaN if all
        attempts failed, and codes are rounded to nearest.
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
    """Rounds a weight to a fixed grid, minimising the output error.

    weight: float32 [K, N]. hessian: float32 [K, K], the mean of x xᵀ over inputs x, times any
    factor. grid: the fixed scales and zero points of all groups.
    damping: this fraction of the mean of the Hessian's diagonal is added to the diagonal.
    is_ordered: whether rows are rounded in descending order of the Hessian's diagonal (act-order);
    otherwise in index order.

    Rows whose input is always zero are rounded to nearest.
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
    """GPTQ that chooses a group's scales when it is reached, from the corrected weights.

    weight, hessian, damping: as in `gptq`. format: with groups; see `why_not_fresh`.
    is_ordered: whether groups are taken in descending order of their largest diagonal element of
        the Hessian, and rows within a group likewise (GPTQModel's group-aware order); otherwise in
        index order.

    Ranges are searched with the Hessian's diagonal as importance.
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
        """Values [groups, 1, N] in rounding order, scattered to group order [groups, N]."""
        return None if values is None else jnp.zeros_like(values[:, 0]).at[groups].set(values[:, 0])

    table = None if found.table is None else found.table[0]
    scales = placed(found.scales)
    assert scales is not None
    parameters = Parameters(scales, placed(found.zeros), None, table)
    grid = Grid(format, channels, parameters)
    return Compensated(grid.with_codes(jnp.zeros_like(codes).at[order].set(codes)), used)


def why_not_fresh(format: WeightFormat) -> str | None:
    """The reason why the scales of a format's groups aren't independent, or None."""
    kind = code_kinds.of(format)
    if kind.has_channel_scales or format.codes == "float8":
        return f"the groups of {format} share scales"
    return None


def _compensate(
    weight: jax.Array, factor: jax.Array, size: int, begin: Begin
) -> tuple[jax.Array, Any]:
    """Rounds rows in turn; returns codes [K, N], and the blocks' extra pytrees, stacked.

    weight: [K, N], with rows in rounding order. factor: upper triangular [K, K], from
    `inverse_factor`. A row's error corrects the rest of its block of `size` rows immediately; later
    rows are corrected by one matrix product per block.
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
    """The upper triangular U with Uᵀ U = H⁻¹, and the damping that was needed.

    Let L be the Cholesky factor of H with rows and columns reversed. L with both reversed back is
    an upper triangular R with H = R Rᵀ, so U = R⁻¹. This takes one factorisation, and never inverts
    H. If all attempts fail, U is the identity and the damping NaN.

    hessian: float32 [K, K]. damping: as for `gptq`. Returns U float32 [K, K], and that damping, a
    float32 scalar.
    """
    diagonal = jnp.diagonal(hessian)
    size = jnp.maximum(diagonal.mean(), jnp.finfo(jnp.float32).tiny)
    identity = jnp.eye(len(hessian), dtype=hessian.dtype)
    # With zero damping, an input channel that is always zero would make H singular.
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
