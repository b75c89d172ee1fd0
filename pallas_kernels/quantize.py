"""Rounding a weight matrix to any packed format."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codes as code_kinds
from pallas_kernels.codes.table import quantize_with_table
from pallas_kernels.formats import WeightFormat
from pallas_kernels.quantized_tensor import QuantizedTensor, pack


def quantize(weight: jax.Array, format: WeightFormat, *, table: jax.Array | None = None) -> Any:
    """Rounds `weight` [K, N] to the nearest codes of `format`: a QuantizedTensor.

    A 16-bit format just casts, to a plain array.

    How scales are chosen is said where each kind of codes is: `pallas_kernels/codes`.
    table: ascending values [2**bits] for `table…` formats; normal float where it is None.

    Raises ValueError where K is not a multiple of the group size, or the table does not fit: its
    values are looked at where they are known, which they are not under `jit`.
    """
    if table is not None and not isinstance(table, jax.core.Tracer):
        values = np.asarray(table, np.float64)
        if not (np.isfinite(values).all() and (np.diff(values) > 0).all()):
            raise ValueError(f"table is {values.tolist()}; expected finite values that ascend")
    return _quantize(weight, format, table)


@functools.partial(jax.jit, static_argnames="format")
def _quantize(
    weight: jax.Array, format: WeightFormat, table: jax.Array | None
) -> QuantizedTensor | jax.Array:
    format.require_matrix(weight.shape)
    if table is not None and not format.codes.startswith("table"):
        raise ValueError(f"{format} has no table: leave `table` out, or choose a table format")
    if not format.is_packed:
        return weight.astype(format.codes)
    values = weight.astype(jnp.float32)
    if table is None:
        found = code_kinds.of(format).quantize(values, format)
    elif table.shape != (2**format.bits,):
        raise ValueError(f"table has shape {table.shape}; {format} expects ({2**format.bits},)")
    else:
        found = quantize_with_table(values, format, table)
    codes, scales, zeros, channel_scales, table = found
    return pack(codes, scales, zeros, format, channel_scales=channel_scales, table=table)
