"""The shapes and dtypes of a packed weight, from only its format."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.quantized_tensor import QuantizedTensor, pack


@functools.lru_cache
def packed_shapes(
    shape: tuple[int, ...],
    format: WeightFormat,
    scale_dtype: str,
    *,
    permuted: bool = False,
    mixed: bool = False,
    static: bool = False,
) -> QuantizedTensor:
    """The result of `pack` for a weight, with `jax.ShapeDtypeStruct`s instead of arrays.

    shape: of the weight, [..., K, N].
    scale_dtype: of its scales, such as "float16".
    permuted: whether the weight has a permutation. mixed: whether it has activation_bits.
    static: whether it has an activation_scale.

    Raises ValueError for a shape or a scale dtype that the format can't have.
    """
    if not format.is_packed:
        raise ValueError(f"{format} is not packed: expected a packed format such as uint4:g128")
    kind = code_kinds.of(format)
    if scale_dtype not in kind.scale_dtypes:
        raise ValueError(
            f"scale_dtype is {scale_dtype!r:.80}: expected {' or '.join(kind.scale_dtypes)}"
        )
    *leading, input_channels, output_channels = shape
    groups = format.groups(input_channels), output_channels

    def array(matrix_shape: tuple[int, ...], dtype: Any, wanted: bool = True) -> Any:
        shape = (*leading, *matrix_shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if wanted else None

    plain = PlainCodes(
        format,
        array((input_channels, output_channels), kind.code_dtype),
        array(groups, scale_dtype),
        array(groups, scale_dtype if kind.has_minima else "uint16", kind.has_zeros),
        permutation=array((input_channels,), "int32", permuted),
        channel_scales=array((output_channels,), "float32", kind.has_channel_scales),
        table=array((2**format.bits,), "float32", kind.has_table),
        activation_bits=array(groups[:1], "uint8", mixed),
        activation_scale=array((1,), "float32", static),
    )
    return jax.eval_shape(pack, plain)
