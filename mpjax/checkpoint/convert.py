"""Brings the tensors of a linear map to the device and into the format that the plan says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.plan import LinearSource
from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, QuantizedTensor, WeightFormat, pack, quantize
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import are_finite
from mpjax.kernels.device import default_device
from mpjax.kernels.quantize import why_out_of_range
from mpjax.models import Linear, LinearPlace

Read = Callable[[TensorInfo], np.ndarray]


def convert_array(info: TensorInfo, dtype: str, read: Read) -> jax.Array:
    """One tensor as it is, in another dtype.

    Raises CheckpointError for values that are not finite, in the file or in the dtype.
    """
    array = _to_device(read(info))
    return _require_finite(info, array, array.astype(dtype))


def convert_linear(
    place: LinearPlace, sources: Sequence[LinearSource], dtype: str, read: Read
) -> list[Linear]:
    """The linear maps of a place, joined as `LinearPlace.join` joins them.

    dtype: of plain kernels, transposed from the file's [out, in] to [in, out], and of biases.
    Raises CheckpointError for values that can't be right, naming the tensor.
    """
    kernels = [_kernel(source, dtype, read) for source in sources]
    biases = [_bias(source, place.bias, dtype, read) for source in sources]
    return place.join([Linear(*maps) for maps in zip(kernels, biases, strict=True)])


def _kernel(source: LinearSource, dtype: str, read: Read) -> jax.Array | QuantizedTensor:
    if source.scheme is not None:
        return pack(_decode(source, source.scheme, read))
    info = source.tensors["weight"]
    weight = _to_device(read(info))
    if source.format is None:
        return _require_finite(info, weight, _transpose(weight, dtype))
    packed = _quantize(_require_finite(info, weight, weight), source.format)
    if reason := why_out_of_range(weight, packed):
        raise CheckpointError(f"{info.name}: {reason}")
    return packed


def _decode(source: LinearSource, scheme: Scheme, read: Read) -> PlainCodes:
    """The plain codes of a quantised module, as `pack` takes them."""
    tensors: dict[str, Any] = {
        suffix: read(info) if suffix in scheme.on_host else _to_device(read(info))
        for suffix, info in source.tensors.items()
        if suffix != "bias"
    }
    plain = scheme.decode(tensors, source.name, source.shape)
    checks.check_scales(source.name, plain.scales)
    plain = dataclasses.replace(plain, scales=_narrow(source.name, plain))
    return _seen_symmetric(plain)


def _seen_symmetric(plain: PlainCodes) -> PlainCodes:
    """The codes without zero points where all are the middle.

    That is seen rather than believed: writers differ by one in how they store zero points.
    """
    format = plain.format
    if not format.codes.startswith("uint") or plain.zeros is None:
        return plain
    if not bool(jnp.all(plain.zeros == 2 ** (format.bits - 1))):
        return plain
    return dataclasses.replace(
        plain, format=dataclasses.replace(format, symmetric=True), zeros=None
    )


def _bias(source: LinearSource, wanted: bool, dtype: str, read: Read) -> jax.Array | None:
    info = source.tensors.get("bias")
    if info is None:
        return None
    if wanted:
        return convert_array(info, dtype, read)
    if np.any(read(info) != 0):
        raise CheckpointError(
            f"{info.name} is not zero, but by config.json the model has no bias there: "
            "the files and config.json are not of one supported checkpoint"
        )
    return None


def _narrow(name: str, plain: PlainCodes) -> jax.Array:
    """Scales in 16 bits, exactly, where packed tensors of the format hold them so."""
    scales = plain.scales
    if scales.dtype != jnp.float32 or "float32" in code_kinds.of(plain.format).scale_dtypes:
        return scales
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = scales.astype(dtype)
        if bool(jnp.all(narrow.astype(jnp.float32) == scales)):
            return narrow
    raise CheckpointError(
        f"{name}.scales is float32 with values that neither float16 nor bfloat16 holds exactly: "
        "save the checkpoint with float16 scales"
    )


def _require_finite(info: TensorInfo, array: jax.Array, converted: jax.Array) -> jax.Array:
    """`converted`, made of a file's `array`; CheckpointError where it isn't finite throughout."""
    if are_finite(converted):
        return converted
    if damaged := int(_count_non_finite(array)):
        raise CheckpointError(
            f"{info.name}: {damaged} of the {array.size} values are NaN or infinite: the "
            "checkpoint is damaged"
        )
    beyond = int(_count_non_finite(converted))
    wider = "bfloat16" if converted.dtype == jnp.float16 else "float32"
    raise CheckpointError(
        f"{info.name}: {beyond} of {array.size} values are beyond the range of {converted.dtype}: "
        f"load with dtype='{wider}'"
    )


def _to_device(array: np.ndarray) -> jax.Array:
    # On a CPU, JAX may take the array's own memory, which is a mapping of a file that may change.
    return jax.device_put(array.copy() if default_device().platform == "cpu" else array)


@functools.partial(jax.jit, static_argnames="dtype")
def _transpose(weight: jax.Array, dtype: str) -> jax.Array:
    return weight.T.astype(dtype)


@functools.partial(jax.jit, static_argnames="format")
def _quantize(weight: jax.Array, format: WeightFormat) -> QuantizedTensor:
    return quantize(weight.T, format)


@jax.jit
def _count_non_finite(array: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(array), dtype=jnp.int32)
