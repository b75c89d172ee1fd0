"""Activations that are quantised on the fly, for products of two 8-bit operands."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mpjax.kernels.arithmetic import largest_magnitude
from mpjax.kernels.checks import as_array, as_dtype, require_floats
from mpjax.kernels.codes import float8
from mpjax.kernels.formats import FLOAT8_GROUP, WeightFormat
from mpjax.kernels.product_format import ActivationFormat, ProductFormat

# Largest magnitudes below this count as zero: their reciprocals would overflow.
NEARLY_ZERO = 1e-30


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedActivations:
    """x [..., K] = values · scales.

    values: int8 or float8_e4m3fn [..., K].
    scales: float32 [..., 1], or [..., groups] where runs of 128 channels share one (the last may
        be cut): what FP8's blocks are multiplied with.
    dtype: name of the dtype that x had, and that products of it have.
    """

    values: jax.Array
    scales: jax.Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x."""
        return self.values.shape

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """X again, computed in float32."""
        channels = self.shape[-1]
        size = channels if self.scales.shape[-1] == 1 else FLOAT8_GROUP
        values = _runs(self.values.astype(jnp.float32), size) * self.scales[..., None]
        return _joined(values, channels).astype(as_dtype("dequantize: dtype", dtype))


def quantize_activations(
    x: jax.Array,
    format: ActivationFormat | ProductFormat | WeightFormat | str,
    dtype: jax.typing.DTypeLike | None = None,
) -> QuantizedActivations:
    """Rounds x [..., K] to what `format` says.

    The scale of a token is its largest magnitude over 127 (int8) or 448 (float8), and NaN where
    the token has NaN or infinities. In `float8:g128` there is one for each token and group of
    channels (DeepSeek-V3), of which the last may be cut. A pure function of x: under `jit`, XLA
    fuses it into whatever produces x. There may be no tokens.
    format: an ActivationFormat, the format of a product, or that of a weight, for what meets it by
        default; or the text of one, such as "float8:g128" or "int8/int8".
    dtype: of products with the result; that of x where it is None.

    Raises ValueError where the format has 16-bit activations, and where x has no channels.
    """
    x = as_array("quantize_activations: x", x)
    require_floats("quantize_activations", x=x)
    wanted = ActivationFormat.of(format)
    if wanted.values is None:
        raise ValueError(f"{format} has 16-bit activations: there is nothing to quantise")
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; expected [..., K] with one channel or more")
    channels = x.shape[-1]
    size = wanted.group_size or channels
    wide = _runs(x.astype(jnp.float32), size)
    top = 127.0 if wanted.values == "int8" else float8.LARGEST
    peaks = largest_magnitude(wide, -1)
    peaks = jnp.where(peaks < NEARLY_ZERO, top, peaks)
    scales = peaks * (1 / top)
    scaled = wide * (top / peaks)[..., None]  # one division for each scale
    if wanted.values == "int8":
        values = jnp.round(scaled).astype(jnp.int8)  # at most 127: scaled exceeds it by rounding
    else:
        values = float8.to_float8(scaled)
    name = as_dtype("quantize_activations: dtype", x.dtype if dtype is None else dtype).name
    return QuantizedActivations(_joined(values, channels), scales, name)


def _runs(x: jax.Array, size: int) -> jax.Array:
    """Channels [..., K] as [..., runs, size], with zeros at the end of a run that is cut."""
    if missing := -x.shape[-1] % size:
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, missing)))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _joined(runs: jax.Array, channels: int) -> jax.Array:
    """The inverse of `_runs`."""
    whole = runs.reshape(*runs.shape[:-2], runs.shape[-2] * runs.shape[-1])
    return whole[..., :channels]
