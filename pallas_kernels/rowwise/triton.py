"""The operations between two products as Triton kernels, with one program for each row."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from mpjax.kernels import arithmetic
from mpjax.kernels.activations import NEARLY_ZERO, QuantizedActivations
from mpjax.kernels.codes.float8 import LARGEST as LARGEST_FLOAT8
from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked, store
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.rowwise.hadamard import tile_size, transform_tile
from mpjax.kernels.rowwise.reference import ACTIVATIONS, quantizes
from mpjax.kernels.target import current_target

NEIGHBOURS = 4  # neighbouring channels that a thread loads at once: 16 bytes of float32
# Eight per thread. With few rows, this many warps have all loads of a row in flight at once.
CHANNELS_PER_WARP = 256


class Terms(NamedTuple):
    """The inputs of a norm's kernel: arrays outside of it, references inside.

    terms: [splits, rows, H]. residual: [rows, H], or None. weight: [H].
    """

    terms: Any
    residual: Any
    weight: Any

    @classmethod
    def of(cls, terms: jax.Array, residual: jax.Array | None, weight: jax.Array) -> Terms:
        """The inputs with terms [splits, ..., H] and a stream [..., H] reshaped to rows."""
        splits, *_, channels = terms.shape
        rows = terms.reshape(splits, -1, channels)
        return cls(rows, None if residual is None else residual.reshape(-1, channels), weight)


# A program's row, the indices of its channels, and their mask, or None if none is needed.
Row = tuple[jax.Array, jax.Array, jax.Array | None]


# These functions have their own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("epsilon", "format", "dtype", "interpret"))
def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    epsilon: float,
    format: ActivationFormat | np.dtype | None = None,
    dtype: jnp.dtype | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | QuantizedActivations]:
    """The stream and its norm; see the public function.

    format: of the norm; a dtype if the norm is an array with another dtype than the stream.
    """
    _, *shape, channels = terms.shape
    operands = Terms.of(terms, residual, weight)
    rows = operands.terms.shape[1]
    dtype = weight.dtype if dtype is None else dtype
    stream = jax.ShapeDtypeStruct((rows, channels), dtype)
    result = _result(rows, channels, dtype, format)
    kernel = functools.partial(_norm_kernel, epsilon=epsilon, size=pl.next_power_of_2(channels))
    outputs = _launch(kernel, operands, (stream, result), "add_rms_norm", interpret)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, leaf.shape[-1]), outputs)


@functools.partial(
    jax.jit, static_argnames=("activation", "dtype", "format", "hadamard", "interpret")
)
def gated(
    terms: jax.Array,
    activation: str,
    dtype: jnp.dtype,
    format: ActivationFormat | None = None,
    hadamard: int | None = None,
    *,
    interpret: bool = False,
) -> jax.Array | QuantizedActivations:
    """activation(gate) · up; see the public function."""
    splits, *shape, both = terms.shape
    rows, channels = terms.size // (splits * both), both // 2
    size = pl.next_power_of_2(channels)
    if hadamard is not None:
        size = tile_size(size, hadamard)
    kernel = functools.partial(_gated_kernel, activation=activation, hadamard=hadamard, size=size)
    result = _result(rows, channels, dtype, format)
    rows_of_terms = terms.reshape(splits, rows, both)
    name = f"gated_{activation}" if hadamard is None else f"gated_{activation}_hadamard"
    outputs = _launch(kernel, rows_of_terms, result, name, interpret)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, leaf.shape[-1]), outputs)


@functools.partial(jax.jit, static_argnames=("block", "dtype", "interpret"))
def hadamard(x: jax.Array, block: int, dtype: jnp.dtype, *, interpret: bool = False) -> jax.Array:
    """The Hadamard transform of x [..., K] in `dtype`; see the public function."""
    *shape, channels = x.shape
    rows = x.reshape(-1, channels)
    size = tile_size(pl.next_power_of_2(channels), block)
    kernel = functools.partial(_hadamard_kernel, block=block, size=size)
    result = _result(len(rows), channels, dtype, None)
    mixed: jax.Array = _launch(kernel, rows, result, "hadamard", interpret)
    return mixed.reshape(*shape, channels)


@functools.partial(jax.jit, static_argnames=("format", "interpret"))
def quantize_rows(
    x: jax.Array, format: ActivationFormat, *, interpret: bool = False
) -> QuantizedActivations:
    """X [..., K] quantised to 8 bits; see the public function."""
    *shape, channels = x.shape
    rows = x.reshape(-1, channels)
    kernel = functools.partial(_quantize_kernel, size=pl.next_power_of_2(channels))
    result = _result(len(rows), channels, x.dtype, format)
    outputs = _launch(kernel, rows, result, "quantize_rows", interpret)
    quantized: QuantizedActivations = jax.tree.map(
        lambda leaf: leaf.reshape(*shape, leaf.shape[-1]), outputs
    )
    return quantized


def _result(
    rows: int, channels: int, dtype: jnp.dtype, format: ActivationFormat | np.dtype | None
) -> Any:
    """The shapes of a result: rows in `dtype`, or in `format`."""
    if isinstance(format, np.dtype):
        return jax.ShapeDtypeStruct((rows, channels), format)
    if format is None or not quantizes(format):
        return jax.ShapeDtypeStruct((rows, channels), dtype)
    return QuantizedActivations(
        jax.ShapeDtypeStruct((rows, channels), format.dtype),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((rows, 1), jnp.float32),  # type: ignore[arg-type]
        jnp.dtype(dtype).name,
    )


def _launch(kernel: Any, operands: Any, outputs: Any, name: str, interpret: bool) -> Any:
    rows, channels = jax.tree.leaves(outputs)[0].shape
    return launch(
        kernel,
        operands,
        out_shape=outputs,
        grid=(rows,),
        settings=Settings(name, warps=warps_of(channels)),
        interpret=interpret,
    )


def warps_of(channels: int) -> int:
    """The number of warps of a program for a row of `channels` channels."""
    return min(16, max(1, pl.next_power_of_2(channels) // CHANNELS_PER_WARP))


def _norm_kernel(
    operands: Terms, stream_ref: Any, result_ref: Any, *, epsilon: float, size: int
) -> None:
    row, channel, mask = place = row_of(operands.terms.shape[2], size)
    stream, weight = stream_of(operands, place, stream_ref.dtype)
    store(stream_ref.at[row, channel], stream, mask=mask)
    _store(result_ref, normed(stream, weight, operands, epsilon), row, channel, mask)


def stream_of(operands: Terms, place: Row, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """In a kernel, the stream of a program's row in `dtype`, and the weight of its norm."""
    row, channel, mask = place
    # Loaded first, because the compiler does not move the load up past the sum of the row.
    weight = _load(operands.weight.at[channel], mask)
    wide = _sum(operands.terms, row, channel, mask)
    if operands.residual is not None:
        wide += _load(operands.residual.at[row, channel], mask)
    return wide.astype(dtype), weight


def normed(stream: jax.Array, weight: jax.Array, operands: Terms, epsilon: float) -> jax.Array:
    """In a kernel, the norm of a row of the stream, in float32."""
    wide = stream.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.sum(wide * wide) / operands.terms.shape[2] + epsilon)
    return wide * weight


def _gated_kernel(
    terms_ref: Any, result_ref: Any, *, activation: str, hadamard: int | None, size: int
) -> None:
    channels = terms_ref.shape[2] // 2
    row, channel, mask = row_of(channels, size)
    gate = _sum(terms_ref, row, channel, mask)
    up = _sum(terms_ref, row, channels + channel, mask)
    wide = activated(gate, up, activation)
    if hadamard is not None:
        wide = transform_tile(wide, hadamard)
    _store(result_ref, wide, row, channel, mask)


def activated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """In a kernel, activation(gate) · up of float32 tiles."""
    target = current_target()
    argument = ACTIVATIONS[activation](gate)
    sigmoid = target.reciprocal(1 + target.exp2(argument * -arithmetic.LOG2_E))
    return gate * sigmoid * up


def _hadamard_kernel(x_ref: Any, result_ref: Any, *, block: int, size: int) -> None:
    row, channel, mask = row_of(x_ref.shape[1], size)
    wide = transform_tile(_load(x_ref.at[row, channel], mask), block)
    _store(result_ref, wide, row, channel, mask)


def _quantize_kernel(x_ref: Any, result_ref: Any, *, size: int) -> None:
    row, channel, mask = row_of(x_ref.shape[1], size)
    _store(result_ref, _load(x_ref.at[row, channel], mask), row, channel, mask)


def row_of(channels: int, size: int) -> Row:
    """The program's row of `channels` channels. size: a power of two, `channels` or more."""
    row = first_program_id()
    # The compiler gives a thread enough neighbours to fill 16 bytes of the narrowest operand. With
    # 8-bit results these are 16, and threads would load float32 in strides of 64 bytes. So a zero
    # is added that the compiler only knows to be a multiple of NEIGHBOURS.
    channel = jnp.arange(size) + (row >> 31) * NEIGHBOURS
    return row, channel, None if channels == size else channel < channels


def _sum(terms: Any, row: jax.Array, channel: jax.Array, mask: jax.Array | None) -> jax.Array:
    return functools.reduce(
        jnp.add, [_load(terms.at[i, row, channel], mask) for i in range(terms.shape[0])]
    )


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return load_masked(ref, mask).astype(jnp.float32)


def _store(
    ref: Any, wide: jax.Array, row: jax.Array, channel: jax.Array, mask: jax.Array | None
) -> None:
    if not isinstance(ref, QuantizedActivations):
        store(ref.at[row, channel], wide.astype(ref.dtype), mask=mask)
        return
    is_int8 = ref.values.dtype == jnp.int8
    top = 127.0 if is_int8 else LARGEST_FLOAT8
    peak = arithmetic.largest_magnitude(wide, tuple(range(wide.ndim)))
    peak = jnp.where(peak < NEARLY_ZERO, top, peak)
    values = wide * (top / peak)
    if is_int8:
        # Adding 1.5 · 2²³ rounds to an integer, which is then in the low bits of the sum. One
        # addition replaces the instructions to round and to convert, which are slow.
        values = jax.lax.bitcast_convert_type(values + 1.5 * 2.0**23, jnp.int32)
    values_ref: Any = ref.values
    scales_ref: Any = ref.scales
    store(values_ref.at[row, channel], values.astype(values_ref.dtype), mask=mask)
    store(scales_ref.at[row, jnp.int32(0)], peak * (1 / top))
