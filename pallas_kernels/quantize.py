"""Rounding a weight matrix to any packed format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import are_finite, as_array, is_known, require_type
from mpjax.kernels.codes.base import Parameters
from mpjax.kernels.codes.float8 import LARGEST as LARGEST_FLOAT8
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.grid import Grid, fit
from mpjax.kernels.leading_axes import over_leading_axes
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.quantized_tensor import QuantizedTensor, pack, unpack

# float16 rounds a smaller scale by 3 % or more, or to zero. Smaller scales in float32 and bfloat16
# are subnormal, and quantisers do not divide by them.
LEAST_FLOAT16_SCALE, LEAST_SCALE = 2.0**-20, float(jnp.finfo(jnp.float32).tiny)


def quantize(
    weight: jax.Array,
    format: WeightFormat | str,
    *,
    table: jax.typing.ArrayLike | Sequence[float] | None = None,
) -> QuantizedTensor | jax.Array:
    """Rounds `weight` [..., K, N] to the nearest codes of `format`: a QuantizedTensor.

    A 16-bit format only casts, to a plain array.

    Each kind of codes in `pallas_kernels/codes` documents how its scales are chosen.
    format: a WeightFormat, or a string that WeightFormat.parse accepts, such as "uint4:g128".
    table: ascending values [2**bits] for `table…` formats, converted to float32; None for normal
        float.

    Raises ValueError if groups don't divide K (FP8's last may be shorter), the table does not fit,
    or weights are NaN, infinite, too large for the scales, or all too small. A group that is too
    small beside larger groups becomes zeros. Under `jit`, values are not known and not checked:
    weights that can't be rounded give meaningless results, without an error.
    """
    weight, format = as_array("quantize: weight", weight), WeightFormat.of(format)
    entries: Any = None if table is None else as_array("quantize: table", table)
    if table is not None and is_known(table):
        entries = np.asarray(entries, np.float32)
        if not (np.isfinite(entries).all() and (np.diff(np.atleast_1d(entries)) > 0).all()):
            raise ValueError(f"table is {entries.tolist()}; expected finite values that ascend")
    elif table is not None:
        entries = entries.astype(jnp.float32)
    packed = _quantize(weight, format, entries)
    if is_known((weight, packed)):
        if not are_finite(weight):
            damaged = int(jnp.sum(~jnp.isfinite(weight)))
            raise ValueError(
                f"quantize: {damaged} of the {weight.size} weights are NaN or infinite: expected "
                "numbers; look where they come from"
            )
        if reason := why_out_of_range(weight, packed):
            raise ValueError(f"quantize: {reason}")
    return packed


@functools.partial(jax.jit, static_argnames="format")
def _quantize(
    weight: jax.Array, format: WeightFormat, table: jax.Array | None
) -> QuantizedTensor | jax.Array:
    format.require_matrix(weight.shape, "weight")
    if table is not None and not code_kinds.has_table(format):
        raise ValueError(f"{format} has no table: leave `table` out, or choose a table format")
    if not format.is_packed:
        return weight.astype(format.codes)
    if table is not None and table.shape != (2**format.bits,):
        raise ValueError(f"table has shape {table.shape}; {format} expects ({2**format.bits},)")

    def round_matrix(weight: jax.Array) -> PlainCodes:
        values = weight.astype(jnp.float32)
        return fit(values, format, table).round(values)

    return pack(over_leading_axes(round_matrix, weight.ndim - 2)(weight))


def quantize_like(
    weight: jax.Array, tensor: QuantizedTensor, *, keep_scales: bool = False
) -> QuantizedTensor:
    """Rounds `weight` [..., K, N] to nearest, to a tensor of the same shape as another one.

    The format, the dtype of scales, the order of channels, a table, and how activations are rounded
    are those of `tensor`.

    keep_scales: whether scales and zero points are those of `tensor`, too, and weights out of their
        range are clamped; else they are fitted as `quantize` does.

    Raises ValueError for another shape. Values are not checked, as by `quantize` under `jit`.
    """
    weight = as_array("quantize_like: weight", weight)
    require_type("quantize_like: tensor", tensor, QuantizedTensor)
    require_type("quantize_like: keep_scales", keep_scales, bool)
    if weight.shape != tensor.shape:
        raise ValueError(
            f"quantize_like: weight has shape {weight.shape}, and the tensor {tensor.shape}: "
            "expected the same"
        )
    return _quantize_like(weight, tensor, keep_scales)


@functools.partial(jax.jit, static_argnums=2)
def _quantize_like(
    weight: jax.Array, tensor: QuantizedTensor, keep_scales: bool
) -> QuantizedTensor:
    def round_matrix(weight: jax.Array, old: PlainCodes) -> PlainCodes:
        values = weight.astype(jnp.float32)
        if old.permutation is not None:
            values = values[old.permutation]
        if keep_scales:
            kept = Parameters(old.scales, old.zeros, old.channel_scales, old.table)
            grid = Grid(old.format, len(values), kept)
        else:
            grid = _with_dtype(fit(values, old.format, old.table), old.scales.dtype)
        found = grid.round(values)
        kept_arrays = ("permutation", "activation_bits", "activation_scale")
        return dataclasses.replace(found, **{name: getattr(old, name) for name in kept_arrays})

    found = over_leading_axes(round_matrix, weight.ndim - 2)(weight, unpack(tensor))
    return pack(found)


def _with_dtype(grid: Grid, dtype: jnp.dtype) -> Grid:
    """A grid whose scales, and minima, are rounded to a dtype."""
    scales, zeros, *rest = grid.parameters
    if zeros is not None and code_kinds.of(grid.format).has_minima:
        zeros = zeros.astype(dtype)
    return dataclasses.replace(grid, parameters=Parameters(scales.astype(dtype), zeros, *rest))


def why_out_of_range(weight: jax.Array, packed: QuantizedTensor | jax.Array) -> str | None:
    """The reason why finite weights are too large for a format, or all too small, or None.

    packed: the weights in the format.
    """
    if not isinstance(packed, QuantizedTensor) and packed.dtype == weight.dtype:
        return None
    leading = weight.ndim - 2
    largest = np.asarray(_largest(weight, leading)).astype(np.float64)
    if isinstance(packed, QuantizedTensor):
        format, stored = str(packed.format), packed.scales()
        if packed.channel_scales is not None:
            stored = packed.channel_scales
        least = LEAST_FLOAT16_SCALE if stored.dtype == jnp.float16 else LEAST_SCALE
        # The largest value that any code has: weights above least · reach have sufficient scales.
        reach = LARGEST_FLOAT8 if packed.table is None else float(jnp.abs(packed.table).max())
        has_small_scales = np.asarray(_largest_scale(stored, leading)) < least
        is_small = (largest > 0) & (largest < least * reach) & has_small_scales
    else:
        format, stored = str(packed.dtype), packed
        is_small = (largest > 0) & (largest < LEAST_FLOAT16_SCALE)
        is_small &= stored.dtype == jnp.float16
    if not is_small.any() and are_finite(stored) and _are_minima_finite(packed):
        return None
    found, fault = largest.max(), "large"
    if is_small.any():
        found, fault = largest[is_small].min(), "small"
    return (
        f"the largest magnitude of the weights is {found:.3g}, too {fault} for {format}, "
        f"whose range is that of {stored.dtype}: "
        "multiply the weights by a power of two, and products with them by its inverse"
    )


def _are_minima_finite(packed: QuantizedTensor | jax.Array) -> bool:
    """Whether the minima of groups are finite; True for formats without minima."""
    if not isinstance(packed, QuantizedTensor) or not code_kinds.of(packed.format).has_minima:
        return True
    return bool(are_finite(packed.zeros()))


@functools.partial(jax.jit, static_argnums=1)
def _largest(array: jax.Array, leading: int) -> jax.Array:
    """The largest magnitude over all axes after `leading` leading axes."""
    return jnp.abs(array).max(tuple(range(leading, array.ndim)))


@functools.partial(jax.jit, static_argnums=1)
def _largest_scale(scales: jax.Array, leading: int) -> jax.Array:
    # For tiny weights, scale 1 replaces a scale that is zero or too small to divide by.
    return _largest(jnp.where(scales < 1, scales, 0), leading)
