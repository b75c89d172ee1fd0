"""Quantised activations: rounding to 8 bits, or to 4 and 8, before a product."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.arithmetic import largest_magnitude
from mpjax.kernels.checks import as_array, as_dtype, require_floats
from mpjax.kernels.codes import float8
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.product_format import ActivationFormat, ProductFormat
from mpjax.kernels.static_rows import StaticRows

# A description of how activations are rounded, as an object or as a string.
Format = (
    ActivationFormat
    | ActivationBlocks
    | DividedRows
    | StaticRows
    | ProductFormat
    | WeightFormat
    | str
)

# A token whose largest magnitude is below this counts as zero: its reciprocal could overflow.
NEARLY_ZERO = 1e-30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["dtype", "is_permuted"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedActivations:
    """Activations x [..., K] ≈ values · scales.

    values: int8 or float8_e4m3fn [..., K].
    scales: float32 [..., 1], one for each token; or [..., groups], one for each 128 input channels
        of a token (the last group may be shorter), for FP8 weights in groups and for `int4`.
    dtype: the name of x's dtype, which products have, too.
    is_permuted: whether channels are in the order of a weight's permutation (`ActivationBlocks`).
    """

    values: jax.Array
    scales: jax.Array
    dtype: str
    is_permuted: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x."""
        return self.values.shape

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """X [..., K] = values · scales, computed in float32 and converted to `dtype`.

        Channels stay in the order of the values.
        """
        channels = self.shape[-1]
        size = channels if self.scales.shape[-1] == 1 else float8.GROUP
        values = _runs(self.values.astype(jnp.float32), size) * self.scales[..., None]
        return _joined(values, channels).astype(as_dtype("dequantize: dtype", dtype))


def quantize_activations(
    x: jax.Array,
    format: Format,
    dtype: jax.typing.DTypeLike | None = None,
) -> QuantizedActivations:
    """Rounds x [..., K] to 8-bit values with scales.

    The scale of a token is its largest magnitude over 127 (int8) or 448 (float8), or NaN if the
    token has NaN or infinities. In `float8:g128` there is a scale for each token and group of input
    channels (DeepSeek-V3); the last group may be shorter. There may be no tokens. Under `jit`, XLA
    fuses this function into the operation that produces x.

    format: an ActivationFormat; or the format of a product or of a weight, for the activations that
        it multiplies; or the string of one, such as "float8:g128" or "int8/int8"; or the
        ActivationBlocks of a weight, with 7 or 127 as the largest code of a block; or DividedRows,
        for x [..., K] that is a part of each row under `shard_map`; or StaticRows, whose scale
        applies to all tokens without NaN and infinities.
    dtype: the dtype of products with the result; None for x's.

    Raises ValueError for a format with 16-bit activations, and for x without channels.
    """
    x = as_array("quantize_activations: x", x)
    require_floats("quantize_activations", x=x)
    blocks = format if isinstance(format, ActivationBlocks) else None
    wanted = (
        format.format
        if isinstance(format, ActivationBlocks | DividedRows | StaticRows)
        else ActivationFormat.of(format)
    )
    if wanted.values is None:
        raise ValueError(f"{format} has 16-bit activations: there is nothing to quantise")
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; expected [..., K] with one channel or more")
    channels = x.shape[-1]
    name = as_dtype("quantize_activations: dtype", x.dtype if dtype is None else dtype).name
    if isinstance(format, StaticRows):
        return _with_static_scale(x, format.checked("quantize_activations"), name)
    blocks = blocks and blocks.checked("quantize_activations", channels)
    if blocks is not None and blocks.permutation is not None:
        x = jnp.take(x, blocks.permutation, axis=-1)
    size = wanted.group_size or channels
    wide = _runs(x.astype(jnp.float32), size)
    top: Any = 127.0 if wanted.values == "int8" else float8.LARGEST
    peaks = largest_magnitude(wide, -1)
    if isinstance(format, DividedRows):
        peaks = format.largest(peaks)
    if blocks is not None and blocks.bits is not None:
        top = jnp.broadcast_to(blocks.largest_codes(channels), peaks.shape)
    peaks = jnp.where(peaks < NEARLY_ZERO, top, peaks)
    scales = peaks * (1 / top)
    scaled = wide * (top / peaks)[..., None]  # one division for each scale, not for each value
    if wanted.values == "int8":
        values = jnp.round(scaled).astype(jnp.int8)  # at most 127: rounding errors are below 1/2
    else:
        values = float8.to_float8(scaled)
    is_permuted = blocks is not None and blocks.permutation is not None
    return QuantizedActivations(_joined(values, channels), scales, name, is_permuted)


def _with_static_scale(x: jax.Array, rows: StaticRows, dtype: str) -> QuantizedActivations:
    """Rounds x [..., K] with one static scale; larger magnitudes are clamped."""
    wide, scale = x.astype(jnp.float32), jax.lax.broadcast_to_rank(rows.scale, x.ndim)
    scaled = wide / scale
    if rows.values == "int8":
        values = jnp.clip(jnp.round(scaled), -128, 127).astype(jnp.int8)
    else:
        values = float8.to_float8(scaled)
    peaks = largest_magnitude(wide, -1)[..., None]
    return QuantizedActivations(values, jnp.where(peaks < jnp.inf, scale, jnp.nan), dtype)


def _runs(x: jax.Array, size: int) -> jax.Array:
    """Splits x [..., K] into runs of channels [..., runs, size]; the last is padded with zeros."""
    if missing := -x.shape[-1] % size:
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, missing)))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _joined(runs: jax.Array, channels: int) -> jax.Array:
    """Joins runs [..., runs, size] to [..., channels]: the inverse of `_runs`."""
    whole = runs.reshape(*runs.shape[:-2], runs.shape[-2] * runs.shape[-1])
    return whole[..., :channels]
