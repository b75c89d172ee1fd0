"""Random packed weights, made and read in numpy from what the docstrings say of their layouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from tests.pallas_kernels.oracles import (
    E2M1,
    NUMPY_DTYPES,
    PACKED_FORMATS,
    as_array,
    exponent_words,
    parameter_words,
    table_codes,
    wide,
)

# Packed formats; symmetric ones differ only where a group's scale meets the weights.
ALL_FORMATS = (
    *(text for text in PACKED_FORMATS if not text.endswith(":sym")),
    *("uint4:g128:sym", "uint8:g64:sym"),
)
INTEGER_FORMATS = ("int8:gK/int8", "liquid4:g64/int8")  # with a sum over all of K

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def random_weight(
    rng: np.random.Generator,
    text: str,
    channels: int,
    outputs: int,
    scale_dtype: str = "float16",
    *,
    permuted: bool = False,
) -> QuantizedTensor:
    """Codes, zero points and offsets over their whole range, scales around 0.01, random tables.

    Scales of `float4` are 2**−7 and 2**−6.

    scale_dtype: of the formats that have a choice.
    """
    format = WeightFormat.parse(text)
    groups = format.groups(channels), outputs
    return _assemble(
        format,
        channels,
        _random_words(rng, format, channels, outputs),
        rng.uniform(0.005, 0.02, groups),
        _random_zeros(rng, format, groups),
        scale_dtype,
        channel_scales=rng.uniform(0.005, 0.02, outputs),
        table=np.sort(rng.uniform(-1, 1, 2**format.bits)),
        permutation=rng.permutation(channels).astype(np.int32) if permuted else None,
    )


def integer_weight(
    rng: np.random.Generator,
    text: str,
    channels: int,
    outputs: int,
    scale_dtype: str = "float16",
) -> QuantizedTensor:
    """Weights whose values are small multiples of a power of two, so that products are exact."""
    format = WeightFormat.parse(text)
    words = _random_words(rng, format, channels, outputs)
    if format.codes == "affine8":
        words &= 0x0707
    if format.codes == "uint8":
        words = (words & 0x0707) + np.uint16(0x7C7C)  # codes in 124 … 131
    if format.codes == "float8":
        small = rng.integers(-4, 5, words.nbytes).astype(FLOAT8)
        words = small.view(words.dtype).reshape(words.shape)
    groups = format.groups(channels), outputs
    middle = 2 ** (format.bits - 1)
    zeros = rng.integers(middle - 2, middle + 3, groups)
    if format.symmetric:
        zeros = np.full(groups, middle)
    has_zeros = format.codes.startswith(("uint", "affine"))
    if format.codes.startswith("affine"):
        zeros = rng.integers(-16, 17, groups)
    return _assemble(
        format,
        channels,
        words,
        rng.choice([0.5, 1.0, 2.0], groups),
        zeros if has_zeros else _random_zeros(rng, format, groups),
        scale_dtype,
        channel_scales=rng.choice([0.5, 1.0, 2.0], outputs),
        table=np.arange(2**format.bits) - middle,
    )


def random_activations(
    rng: np.random.Generator, weight: QuantizedTensor, rows: int, dtype: str
) -> jax.Array | QuantizedActivations:
    """Normal, one channel 50 times as strong as the rest; as a kernel for `weight` takes them."""
    x = rng.standard_normal((rows, weight.shape[0]))
    x[:, weight.shape[0] // 3] *= 50
    activations = as_array(x, dtype)
    if weight.format.operand is None:
        return activations
    return jax.jit(quantize_activations, static_argnums=1)(activations, weight.format)


def integer_activations(
    rng: np.random.Generator, weight: QuantizedTensor, rows: int, dtype: str
) -> jax.Array | QuantizedActivations:
    """Small integers, or int8 over its range, scaled by powers of two."""
    shape = rows, weight.shape[0]
    operand = weight.format.operand
    if operand is None:
        return as_array(rng.integers(-2, 3, shape), dtype)
    by_group = weight.format.codes in ("float8", "int4") and weight.format.group_size is not None
    groups = len(weight.parameters) if by_group else 1
    scales = rng.choice([0.5, 1.0, 2.0], (rows, groups)).astype(np.float32)
    if operand == "float8":
        values = rng.integers(-4, 5, shape).astype(FLOAT8)
    else:
        values = rng.integers(-127, 128, shape).astype(np.int8)
    return QuantizedActivations(jnp.asarray(values), jnp.asarray(scales), dtype)


def exact(x: jax.Array | QuantizedActivations) -> np.ndarray:
    """float64 [..., K]: values · scales where x is quantised."""
    if not isinstance(x, QuantizedActivations):
        return wide(x)
    values, scales = wide(x.values), wide(x.scales)
    if scales.shape[-1] > 1:
        scales = np.repeat(scales, 128, axis=-1)[..., : values.shape[-1]]
    return values * scales


def output_channels(weight: QuantizedTensor, chosen: np.ndarray) -> QuantizedTensor:
    """Some output channels of a weight: enough to judge a large product by."""
    channel_scales = weight.channel_scales
    return dataclasses.replace(
        weight,
        words=np.asarray(weight.words)[:, chosen],
        parameters=np.asarray(weight.parameters)[:, chosen],
        channel_scales=None if channel_scales is None else np.asarray(channel_scales)[chosen],
    )


def _random_words(
    rng: np.random.Generator, format: WeightFormat, channels: int, outputs: int
) -> np.ndarray:
    """Also where K is padded; every bit of a word is part of a code. No NaN among FP8 values."""
    blocks = -(-channels // format.block)
    shape = blocks, outputs, format.columns * format.plane_width
    if format.is_flat:
        shape = 1, outputs, blocks * format.block
    itemsize = format.word_bits // 8
    limits = (-127, 128) if format.codes == "int8" else (0, 256)
    data = rng.integers(*limits, (*shape, itemsize)).astype(np.uint8)
    if format.codes == "float8":
        data[data & 0x7F == 0x7F] ^= 1
    dtype = {1: FLOAT8 if format.codes == "float8" else np.uint8, 2: np.uint16}[itemsize]
    if format.codes == "int8":
        dtype = np.int8
    return data.view(dtype)[..., 0]


def _random_zeros(
    rng: np.random.Generator, format: WeightFormat, groups: tuple[int, int]
) -> np.ndarray:
    """Zero points, 2**bits included; of `liquid4`, offsets in the place of scales too."""
    if format.symmetric:
        return np.full(groups, 2 ** (format.bits - 1))
    if format.codes.startswith("uint"):
        return rng.integers(0, 2**format.bits + 1, groups)
    if format.codes.startswith("affine"):
        return -rng.integers(0, 2**format.bits, groups) / 2**7  # around the middle of the codes
    if format.codes == "liquid4":
        steps = rng.integers(1, 16, groups)
        return steps + 2**8 * rng.integers(0, 256 - 15 * steps)  # no sum above 255
    return np.zeros(groups, np.int64)


def _assemble(
    format: WeightFormat,
    channels: int,
    words: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    scale_dtype: str,
    *,
    channel_scales: np.ndarray,
    table: np.ndarray,
    permutation: np.ndarray | None = None,
) -> QuantizedTensor:
    has_table, is_liquid = format.codes.startswith("table"), format.codes == "liquid4"
    blocks = -(-channels // format.block)
    padding = (0, format.groups(blocks * format.block) - len(zeros)), (0, 0)
    scales, zeros = np.pad(scales, padding), np.pad(zeros, padding)
    if is_liquid:
        halves = zeros.astype(np.uint16)
        scale_dtype, parameters = "uint16", parameter_words(halves[0::2], halves[1::2])
    elif format.codes == "float4":
        powers = np.where(scales == 0, 2.0**-127, 2.0 ** np.ceil(np.log2(np.maximum(scales, 0.01))))
        scale_dtype, parameters = "bfloat16", exponent_words(powers)
    elif format.codes in ("float8", "int8", "int4"):
        scale_dtype, parameters = "float32", scales.astype(np.float32).view(np.uint32)
    else:
        has_minima = format.codes.startswith("affine")
        scale_dtype = "float16" if has_minima else scale_dtype
        low = scales.astype(NUMPY_DTYPES[scale_dtype])
        parameters = parameter_words(low, zeros.astype(low.dtype if has_minima else np.uint16))
    return QuantizedTensor(
        jnp.asarray(words),
        jnp.asarray(parameters),
        format,
        scale_dtype,
        blocks * format.block - channels,
        None if permutation is None else jnp.asarray(permutation),
        jnp.asarray(channel_scales.astype(np.float32)) if is_liquid else None,
        jnp.asarray(table.astype(np.float32)) if has_table else None,
    )


def dense(weight: QuantizedTensor, table_dtype: str = "float32") -> np.ndarray:
    """The exact matrix float64 [K, N], in the order of the input channels.

    table_dtype: what the entries of a table are rounded to, as they are in a kernel, and the scales
        and minima of `affine…`.
    """
    parameters, codes = np.asarray(weight.parameters), weight.format.codes
    fields = _fields(weight)  # [K padded, N]
    if codes == "liquid4":
        values = integers(weight) * np.asarray(weight.channel_scales).astype(np.float64)
        return _restored(values, weight)
    if codes == "float4":
        exponents = np.stack([parameters >> (8 * i) & 255 for i in range(4)], 1).astype(np.int64)
        scales = np.ldexp(1.0, exponents.reshape(-1, fields.shape[1]) - 127)
    elif weight.scale_dtype == "float32":
        scales = parameters.view(np.float32)
    else:
        scales = (parameters % 2**16).astype(np.uint16).view(NUMPY_DTYPES[weight.scale_dtype])
    if codes.startswith("table"):
        table = np.asarray(weight.table).astype(NUMPY_DTYPES.get(table_dtype, table_dtype))
        values = table.astype(np.float64)[fields]
    elif codes == "float4":
        values = E2M1[fields]
    elif codes.startswith("uint"):
        groups = fields.reshape(len(parameters), -1, fields.shape[1]).astype(np.float64)
        values = (groups - (parameters >> 16)[:, None]).reshape(fields.shape)
    else:
        values = fields.astype(np.float64)
    groups = values.reshape(len(scales), -1, fields.shape[1])
    scaled = groups * scales.astype(np.float64)[:, None]
    if codes.startswith("affine"):
        minima = (parameters >> 16).astype(np.uint16).view(np.float16)
        steps, minima = (
            x.astype(NUMPY_DTYPES.get(table_dtype, table_dtype)).astype(np.float64)[:, None]
            for x in (scales, minima)
        )
        scaled = groups * steps + minima
    scaled = scaled.reshape(fields.shape)
    return _restored(scaled[: weight.shape[0]], weight)


def integers(weight: QuantizedTensor) -> np.ndarray:
    """The int64 [K, N], in packed order, that an integer product multiplies."""
    fields = _fields(weight).astype(np.int64)
    if weight.format.codes == "liquid4":
        parameters = np.asarray(weight.parameters).astype(np.int64)
        halves = np.stack([parameters % 2**16, parameters >> 16], 1)  # [words, 2, N]
        halves = halves.reshape(-1, 1, fields.shape[1])
        groups = fields.reshape(len(halves), -1, fields.shape[1])
        values = groups * (halves % 2**8) + (halves >> 8)
        assert values.max() < 256
        fields = (values ^ 0x80).astype(np.uint8).view(np.int8).reshape(fields.shape)
    return fields[: weight.shape[0]].astype(np.int64)


def _fields(weight: QuantizedTensor) -> np.ndarray:
    """Codes [K padded, N], of `float8` their values."""
    format, words = weight.format, np.asarray(weight.words)
    if format.is_flat:
        return words[0].T
    words = words.reshape(*words.shape[:2], format.columns, format.plane_width)
    columns, bits = list(np.moveaxis(words, 2, 0)), format.bits
    if format.codes.startswith("table"):
        fields = [table_codes(columns, plane, bits) for plane in range(format.planes)]
    else:
        fields = [columns[0] >> (j * bits) & (2**bits - 1) for j in range(format.planes)]
    planes = np.stack(fields, 2)  # [blocks, N, planes, plane width]
    codes = planes.transpose(0, 2, 3, 1).reshape(-1, words.shape[1]).astype(np.uint8)
    if format.codes == "int4":
        return np.where(codes < 8, codes, codes - 16).view(np.int8)
    return codes.view(FLOAT8) if format.codes == "float8" else codes


def _restored(values: np.ndarray, weight: QuantizedTensor) -> np.ndarray:
    """Rows in the order of the input channels."""
    if weight.permutation is None:
        return values
    restored = np.empty_like(values)
    restored[np.asarray(weight.permutation)] = values
    return restored


def weight_struct(text: str, channels: int, outputs: int) -> QuantizedTensor:
    """The shapes and dtypes of a packed weight, without its bytes."""
    matrix = jax.ShapeDtypeStruct((channels, outputs), jnp.bfloat16)
    return jax.eval_shape(lambda w: quantize(w, WeightFormat.parse(text)), matrix)
