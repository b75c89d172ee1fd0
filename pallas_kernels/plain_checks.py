"""Checks of plain codes before they are packed.

Under `jit`, values are not known, and only shapes and dtypes are checked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activation_blocks import require_widths
from mpjax.kernels.checks import as_array, is_known, optional_array
from mpjax.kernels.codes import float4
from mpjax.kernels.codes.int4 import LEAST, MOST
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.static_rows import require_positive

_OPTIONAL = (
    *("zeros", "permutation", "channel_scales", "table", "activation_bits", "activation_scale"),
)


def read_arrays(operation: str, plain: PlainCodes) -> PlainCodes:
    """The plain codes with lists and numbers converted to arrays.

    operation: the function that takes the codes, for messages.

    Raises ValueError for fields that are neither arrays nor such.
    """
    arrays: dict[str, Any] = {
        name: as_array(f"{operation}: {name}", getattr(plain, name)) for name in ("codes", "scales")
    } | {name: optional_array(f"{operation}: {name}", getattr(plain, name)) for name in _OPTIONAL}
    return dataclasses.replace(plain, **arrays)


def require_sound(plain: PlainCodes) -> None:
    """Raises ValueError unless shapes, dtypes and values are as PlainCodes documents them."""
    _check_layout(plain)
    format, zeros = plain.format, plain.zeros
    if code_kinds.of(format).code_dtype == jnp.uint8:
        _check_values("codes", plain.codes, 2**format.bits - 1)
    if zeros is not None and not code_kinds.of(format).has_minima:
        _check_values("zeros", zeros, 255 if format.codes == "liquid4" else 2**format.bits)
    if format.codes == "liquid4":
        _check_values("scales", plain.scales, 255)
        assert zeros is not None
        _check_bytes(plain.codes, plain.scales, zeros)
    if format.codes == "float4":
        _check_powers(plain.scales)
    if format.codes == "int4":
        _check_values("codes", plain.codes, MOST, LEAST)
    if plain.activation_bits is not None:
        require_widths("activation_bits", plain.activation_bits)
    if plain.activation_scale is not None:
        require_positive("activation_scale", plain.activation_scale)
    if plain.permutation is not None:
        _check_permutation(plain.permutation)


def _check_layout(plain: PlainCodes) -> None:
    """Raises ValueError unless shapes and dtypes are as the format demands."""
    format, codes, scales = plain.format, plain.codes, plain.scales
    if not format.is_packed:
        raise ValueError(f"{format} is not packed: a plain array needs no packing")
    format.require_matrix(codes.shape, "codes")
    kind = code_kinds.of(format)
    unsigned = kind.code_dtype == jnp.uint8 and jnp.issubdtype(codes.dtype, jnp.unsignedinteger)
    if not unsigned and codes.dtype != kind.code_dtype:
        wanted_dtype = "unsigned integers" if kind.code_dtype == jnp.uint8 else kind.code_dtype
        raise ValueError(f"codes have dtype {codes.dtype}; expected {wanted_dtype}")
    *leading, input_channels, output_channels = codes.shape
    groups = format.groups(input_channels), output_channels
    wanted = {
        "scales": groups,
        "zeros": groups if kind.has_zeros else None,
        "permutation": None if plain.permutation is None else (input_channels,),
        "channel_scales": (output_channels,) if kind.has_channel_scales else None,
        "table": (2**format.bits,) if kind.has_table else None,
        "activation_bits": None if plain.activation_bits is None else groups[:1],
        "activation_scale": None if plain.activation_scale is None else (1,),
    }
    for name, matrix_shape in wanted.items():
        expected = None if matrix_shape is None else (*leading, *matrix_shape)
        array = getattr(plain, name)
        found = None if array is None else array.shape
        if found != expected:
            raise ValueError(f"{name}: the shape is {found}, and {format} expects {expected}")
    if scales.dtype.name not in kind.scale_dtypes:
        raise ValueError(
            f"scales have dtype {scales.dtype}; expected {' or '.join(kind.scale_dtypes)}"
        )
    if plain.activation_bits is not None and format.codes != "int4":
        raise ValueError(f"there are activation_bits, which {format} does not have: leave them out")
    _check_activation_scale(plain.activation_scale, format)
    if kind.has_minima and plain.zeros is not None and plain.zeros.dtype != scales.dtype:
        raise ValueError(
            f"zeros: the dtype is {plain.zeros.dtype}; expected {scales.dtype}, that of the "
            "scales, since they are minima"
        )
    zeros = () if kind.has_minima else ("zeros",)
    for name in (*zeros, "permutation", "activation_bits"):
        indices = getattr(plain, name)
        if indices is not None and not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(
                f"{name}: the dtype is {indices.dtype}; expected integers: convert them"
            )


def _check_activation_scale(scale: jax.Array | None, format: WeightFormat) -> None:
    if scale is None:
        return
    if not ActivationFormat.of(format).scales_rows:
        raise ValueError(
            f"there is an activation_scale, and {format} does not round rows of activations: leave "
            "it out"
        )
    if scale.dtype != jnp.float32:
        raise ValueError(f"activation_scale: the dtype is {scale.dtype}; expected float32")


def _check_values(name: str, array: jax.Array, largest: int, least: int = 0) -> None:
    if not is_known(array):
        return
    with jax.ensure_compile_time_eval():  # under `jit`, arrays that are constants are known
        low, high = int(array.min()), int(array.max())
    if low < least or high > largest:
        raise ValueError(f"{name} are {low} to {high}; expected {least} to {largest}")


def _check_powers(scales: jax.Array) -> None:
    """Raises ValueError unless scales in bfloat16 are powers of two from 2**−127, 0 or NaN.

    Bits are compared, since XLA on a CPU takes subnormals for 0.
    """
    if not is_known(scales):
        return
    with jax.ensure_compile_time_eval():
        given = jnp.asarray(scales)
        kept = float4.scales_of(float4.exponents_of(given))
        bits, kept_bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (given, kept))
        is_kept = (bits == kept_bits) | (bits == 0) | jnp.isnan(given)
        if not is_kept.all():
            raise ValueError(
                f"scales of float4 are {float(given[~is_kept][0]):.4g}, among others: expected "
                "powers of two, of which the exponent is kept"
            )


def _check_bytes(codes: jax.Array, steps: jax.Array, offsets: jax.Array) -> None:
    if not is_known((codes, steps, offsets)):
        return
    with jax.ensure_compile_time_eval():
        groups = (*codes.shape[:-2], steps.shape[-2], -1, codes.shape[-1])
        peaks = jnp.asarray(codes).reshape(groups).max(-2)
        peaks, steps, offsets = (jnp.asarray(x).astype(jnp.int32) for x in (peaks, steps, offsets))
        largest = int((peaks * steps + offsets).max())
    if largest > 255:  # it would carry into the byte of another code
        raise ValueError(
            f"code · step + offset is up to {largest}; expected at most 255, a byte: choose "
            "smaller steps or offsets"
        )


def _check_permutation(permutation: jax.Array) -> None:
    if not is_known(permutation):
        return
    channels = permutation.shape[-1]
    for found in np.asarray(permutation).reshape(-1, channels):
        missing = np.setdiff1d(np.arange(channels), found)
        if missing.size:  # without missing channels, there is no room for repeated or wrong ones
            raise ValueError(
                f"permutation lacks {missing.size} of {channels} channels, such as {missing[0]}; "
                f"expected each of 0 to {channels - 1} once"
            )
