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

    Raises ValueError for fields that can't be converted.
    """
    arrays: dict[str, Any] = {
        name: as_array(f"{operation}: {name}", getattr(plain, name)) for name in ("codes", "scales")
    } | {name: optional_array(f"{operation}: {name}", getattr(plain, name)) for name in _OPTIONAL}
    return dataclasses.replace(plain, **arrays)


def require_sound(plain: PlainCodes) -> None:
    """Raises ValueError unless shapes, dtypes and values are as documented in PlainCodes."""
    _check_layout(plain)
    code_kinds.of(plain.format).require_values(plain)
    if plain.activation_bits is not None:
        require_widths("activation_bits", plain.activation_bits)
    if plain.activation_scale is not None:
        require_positive("activation_scale", plain.activation_scale)
    if plain.permutation is not None:
        _check_permutation(plain.permutation)


def _check_layout(plain: PlainCodes) -> None:
    """Raises ValueError unless shapes and dtypes are as the format requires."""
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


def _check_permutation(permutation: jax.Array) -> None:
    if not is_known(permutation):
        return
    channels = permutation.shape[-1]
    for found in np.asarray(permutation).reshape(-1, channels):
        missing = np.setdiff1d(np.arange(channels), found)
        if missing.size:  # if none is missing, none is repeated or out of range
            raise ValueError(
                f"permutation lacks {missing.size} of {channels} channels, such as {missing[0]}; "
                f"expected each of 0 to {channels - 1} once"
            )
