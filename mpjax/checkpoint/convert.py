"""Moves tensors to the device and converts them to the plan's formats."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.plan import LinearSource, TableSource
from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.transfer import PIECE_BYTES, to_device
from mpjax.checkpoint.windows import keeps_scales, take
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, QuantizedTensor, WeightFormat, pack, quantize
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import are_finite
from mpjax.kernels.formats import can_be_symmetric
from mpjax.kernels.quantize import why_out_of_range
from mpjax.models import ExpertPlace, Linear, LinearPlace
from mpjax.precision import describe_weights

# Largest relative rounding errors. A larger error means that the range is exceeded.
FLOAT16_ERROR, BFLOAT16_ERROR = 2**-11, 2**-8
SMALLEST = 2.0**-126  # smallest normal float32: for smaller scales, absolute errors count

Read = Callable[[TensorInfo], np.ndarray]


def convert_array(source: TensorInfo | TableSource, dtype: str, read: Read) -> jax.Array:
    """A parameter outside linear maps, on the device in `dtype`.

    Raises CheckpointError for values that are not finite, or exceed the dtype's range.
    """
    if isinstance(source, TensorInfo):
        array = to_device(read(source))
        return _require_finite(source, array, array.astype(dtype))
    table = source.reader.dequantize(_read_module(source, source.reader, read), source.name)
    return _require_finite(_first(source), table, _transpose(table, dtype))


def convert_linear(
    place: LinearPlace, sources: Sequence[LinearSource], dtype: str, read: Read
) -> list[Linear]:
    """The linear maps of a parameter, joined by `LinearPlace.join`.

    sources: one for each of the place's names. dtype: of biases and of unquantised kernels, which
    are transposed from the file's [out, in] to [in, out]. Raises CheckpointError, which names the
    tensor, for values that are not finite or contradict config.json, and for maps that can't be
    joined.
    """
    return _convert(place, sources, dtype, read, _shared_dtype(sources, read))


def _convert(
    place: LinearPlace,
    sources: Sequence[LinearSource],
    dtype: str,
    read: Read,
    scale_dtype: str | None,
) -> list[Linear]:
    maps = (
        Linear(_kernel(source, dtype, read, scale_dtype), _bias(source, place.bias, dtype, read))
        for source in sources
    )
    with as_checkpoint_errors():
        return place.join(maps)  # `join` may join some maps before it takes the next


def convert_experts(
    place: ExpertPlace, sources: Sequence[LinearSource], dtype: str, read: Read
) -> Iterator[Linear]:
    """Yields stacks of a few experts each, of at most PIECE_BYTES in 16 bits, or one expert.

    Arguments and errors are those of `convert_linear`.
    """
    each, scale_dtype = place.joined_maps, _shared_dtype(sources, read)
    for window in place.pieces(PIECE_BYTES):
        some = sources[window.begin * each : window.end * each]
        yield _convert(place.within([window]), some, dtype, read, scale_dtype)[0]


@contextlib.contextmanager
def as_checkpoint_errors() -> Iterator[None]:
    """A context that turns ValueError into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _kernel(
    source: LinearSource, dtype: str, read: Read, scale_dtype: str | None
) -> jax.Array | QuantizedTensor:
    if source.reader is not None and source.format is None:
        return _dequantize(source, source.reader, dtype, read)
    if source.reader is not None:
        return pack(_decode(source, read, scale_dtype))
    info = source.tensors["weight"]
    weight = to_device(take(source, "weight", read(info)))
    weight = weight.T if source.is_transposed else weight
    if source.format is None:
        return _require_finite(info, weight, _transpose(weight, dtype))
    packed = _quantize(_require_finite(info, weight, weight), source.format)
    if reason := why_out_of_range(weight, packed):
        raise CheckpointError(f"{info.name}: {reason}")
    return packed


def _decode(source: LinearSource, read: Read, scale_dtype: str | None) -> PlainCodes:
    """The plain codes of a quantised module, ready for `pack`.

    scale_dtype: the common dtype of scales (`_shared_dtype`), or None.
    """
    plain = _read_plain(source, read)
    shared = scale_dtype if _scale_choices(source) else None
    scales = _narrow_scales(source.name, plain, shared)
    return _drop_middle_zeros(dataclasses.replace(plain, scales=scales))


def _read_plain(source: LinearSource, read: Read) -> PlainCodes:
    """The plain codes that the module's reader decodes; CheckpointError for infinite scales."""
    assert source.reader is not None
    tensors = _read_module(source, source.reader, read)
    plain = source.reader.decode(tensors, source.name, source.read_shape)
    checks.check_scales(source.name, plain.scales)
    if plain.zeros is not None and code_kinds.of(plain.format).has_minima:
        checks.check_scales(source.name, plain.zeros, "minima")
    return plain


def _shared_dtype(sources: Sequence[LinearSource], read: Read) -> str | None:
    """The common scale dtype of a place's maps if the scales' values decide it; else None.

    Maps can be joined only if their scales have one dtype. It is the dtype with the smallest
    maximal relative error over all maps. None if values decide the dtype of at most one map.
    """
    deciding = [source for source in sources if _scale_choices(source)]
    errors: dict[str, list[float]] = {}
    for source in deciding if len(deciding) > 1 else ():
        scales = _read_plain(source, read).scales
        for dtype in _scale_choices(source):
            error = float(_largest_error(scales, scales.astype(dtype)))
            errors.setdefault(dtype, []).append(error)
    return min(errors, key=lambda dtype: max(errors[dtype]), default=None)


def _scale_choices(source: LinearSource) -> tuple[str, ...]:
    """The scale dtypes to choose from by the scales' values; empty if there is no choice."""
    if source.format is None or keeps_scales(source):
        return ()
    dtypes = code_kinds.of(source.format).scale_dtypes
    return dtypes if len(dtypes) > 1 else ()


def _dequantize(source: LinearSource, reader: Reader, dtype: str, read: Read) -> jax.Array:
    tensors = _read_module(source, reader, read)
    weight = reader.dequantize(tensors, source.name, source.read_shape)
    return _require_finite(_first(source), weight, weight.astype(dtype))


def _first(source: TableSource | LinearSource) -> TensorInfo:
    """The first tensor of a module, for messages."""
    return next(iter(source.tensors.values()))


def _read_module(source: TableSource | LinearSource, reader: Reader, read: Read) -> dict[str, Any]:
    """The tensors of a quantised module by suffix, without its bias."""
    found: dict[str, Any] = {}
    for suffix, info in source.tensors.items():
        if suffix != "bias":
            array = read(info)
            array = array if isinstance(source, TableSource) else take(source, suffix, array)
            found[suffix] = array if suffix in reader.on_host else to_device(array)
    return found


def _drop_middle_zeros(plain: PlainCodes) -> PlainCodes:
    """Makes unsigned codes symmetric if all zero points are the middle of the codes.

    Decided by values, not by config.json: writers store zero points with different offsets.
    """
    format = plain.format
    if not can_be_symmetric(format.codes) or plain.zeros is None:
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
        return convert_array(info, dtype, lambda info: take(source, "bias", read(info)))
    if np.any(read(info) != 0):
        raise CheckpointError(
            f"{info.name} is not zero, but by config.json the module has no bias: "
            "the files and config.json are not of one supported checkpoint"
        )
    return None


def _narrow_scales(name: str, plain: PlainCodes, shared: str | None) -> jax.Array:
    """Rounds float32 scales to a 16-bit dtype if the format packs 16-bit scales.

    shared: the dtype, if `_shared_dtype` has decided it. Otherwise it is the one with the smallest
    maximal relative error. Warns unless the error is 0. Raises CheckpointError if the scales exceed
    the range of all choices.
    """
    scales, dtypes = plain.scales, code_kinds.of(plain.format).scale_dtypes
    if shared is not None:
        dtypes = (shared,)
    elif scales.dtype != jnp.float32 or "float32" in dtypes:
        return scales
    candidates = [scales.astype(dtype) for dtype in dtypes]
    errors = [float(_largest_error(scales, narrow)) for narrow in candidates]
    error, narrow = min(zip(errors, candidates, strict=True), key=lambda pair: pair[0])
    if error > BFLOAT16_ERROR:
        raise CheckpointError(
            f"{name} has float32 scales beyond the range of {' and '.join(dtypes)}, in which "
            f"{describe_weights(plain.format)} keeps them: load another checkpoint of the model"
        )
    if error:  # the same message for most maps, which Python prints once
        bound = FLOAT16_ERROR if error <= FLOAT16_ERROR else BFLOAT16_ERROR
        warnings.warn(
            f"scales in float32 are rounded to {narrow.dtype}, in which "
            f"{describe_weights(plain.format)} keeps them: by {bound:.2%} at most",
            stacklevel=2,
        )
    return narrow


@jax.jit
def _largest_error(scales: jax.Array, narrow: jax.Array) -> jax.Array:
    """The largest relative error of `narrow` as an approximation of `scales`."""
    scales = scales.astype(jnp.float32)
    error = jnp.abs(narrow.astype(jnp.float32) - scales)
    return jnp.max(error / jnp.maximum(jnp.abs(scales), SMALLEST))


def _require_finite(info: TensorInfo, array: jax.Array, converted: jax.Array) -> jax.Array:
    """Returns `converted`, made from a file's `array`; CheckpointError unless it is finite."""
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


@functools.partial(jax.jit, static_argnames="dtype")
def _transpose(weight: jax.Array, dtype: str) -> jax.Array:
    return weight.T.astype(dtype)


@functools.partial(jax.jit, static_argnames="format")
def _quantize(weight: jax.Array, format: WeightFormat) -> QuantizedTensor:
    packed = quantize(weight.T, format)
    assert isinstance(packed, QuantizedTensor)  # `format` has codes
    return packed


@jax.jit
def _count_non_finite(array: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(array), dtype=jnp.int32)
