"""A quantised weight before it is packed: plain codes and their parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import as_dtype
from mpjax.kernels.codes.base import Parameters
from mpjax.kernels.codes.liquid import Liquid
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.leading_axes import over_leading_axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("codes", "scales", "zeros", "permutation", "channel_scales", "table", "activation_bits"),
        "activation_scale",
    ],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class PlainCodes:
    """A quantised weight W [..., K, N], as quantisers and checkpoint readers pass it to `pack`.

    Row i of the codes belongs to group i // group_size. It is input channel permutation[i] of W, or
    channel i without a permutation. Leading axes (experts, layers) come before the axes that are
    given here, in every array, even in a table: `jax.vmap` and `jax.lax.scan` over them get one
    matrix at a time.

    format: a WeightFormat, or a string that WeightFormat.parse accepts, such as "uint4:g128".
    codes: [K, N]: int8 for `int8` and `int4`, float8_e4m3fn for `float8`, and otherwise unsigned
        integers. K is a multiple of the group size, except for `float8` and `int4`, whose last
        group may be shorter.
    scales: [groups, N]: float16 or bfloat16 for `uint…` and `table…`, float16 for `affine…`,
        powers of two in bfloat16 for `float4`, where 0 becomes 2**−127, float32 for `int8`, `int4`
        and `float8`, uint16 steps up to 255 for `liquid4`.
    zeros: integers [groups, N]: the zero points of `uint…`, from 0 to 2**bits, or the offsets of
        `liquid4`, from 0 to 255. For `affine…` the minima, float16. None for other formats, and for
        symmetric formats, whose zero points are all 2**(bits − 1).
    permutation: integers [K], each of range(K) once (GPTQ's act-order), or None.
    channel_scales: float32 [N], the scales of `liquid4`'s output channels, else None.
    table: float32 [2**bits], the values of `table…` codes, else None.
    activation_bits: integers [groups] of `int4`, the bits, 4 or 8, of the activations that each
        group multiplies; None for 8 in all groups, and for other formats.
    activation_scale: float32 [1], positive, the static scale of all tokens' activations, for
        formats whose products round each row; None for a scale per row.
    """

    format: WeightFormat
    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    permutation: jax.Array | None = None
    channel_scales: jax.Array | None = None
    table: jax.Array | None = None
    activation_bits: jax.Array | None = None
    activation_scale: jax.Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", WeightFormat.of(self.format))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, [..., K, N]."""
        return self.codes.shape

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The weight [..., K, N], its input channels in original order, computed in float32."""
        dtype = as_dtype("dequantize: dtype", dtype)
        return over_leading_axes(_dequantize, len(self.shape) - 2)(self).astype(dtype)


@jax.jit
def _dequantize(plain: PlainCodes) -> jax.Array:
    values = _decode(plain, code_kinds.of(plain.format).decode)
    if plain.permutation is None:
        return values
    return jnp.zeros_like(values).at[plain.permutation].set(values)


def operands(plain: PlainCodes) -> jax.Array:
    """The int8 operand [K, N] of a product with int8 activations, before any float scale."""
    kind = code_kinds.of(plain.format)
    return _decode(plain, kind.first_level) if isinstance(kind, Liquid) else plain.codes


def _decode(
    plain: PlainCodes, decode_groups: Callable[[jax.Array, Parameters], jax.Array]
) -> jax.Array:
    groups = in_groups(plain.codes, plain.format)
    parameters = Parameters(plain.scales, plain.zeros, plain.channel_scales, plain.table)
    values = decode_groups(groups, parameters.of_groups())
    return values.reshape(-1, plain.shape[1])[: plain.shape[0]]


def in_groups(values: jax.Array, format: WeightFormat) -> jax.Array:
    """Values [K, N] as [groups, size, N]; a shorter last group is padded with zeros."""
    channels, outputs = values.shape
    size = format.group_size or channels
    missing = -channels % size
    if missing:
        values = jnp.pad(values, ((0, missing), (0, 0)))
    return values.reshape(-1, size, outputs)
