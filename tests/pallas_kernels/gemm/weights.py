"""Random packed weights, made in numpy from the layout that QuantizedTensor describes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QuantizedTensor, WeightFormat, pack
from tests.pallas_kernels.oracles import NUMPY_DTYPES, parameter_words


def random_weight(
    rng: np.random.Generator,
    text: str,
    channels: int,
    outputs: int,
    scale_dtype: str = "float16",
    *,
    permuted: bool = False,
) -> QuantizedTensor:
    """Codes and zero points over their whole range, 2**bits included; scales around 0.01."""
    format = WeightFormat.parse(text)
    codes = rng.integers(0, 2**format.bits, _blocks(format, channels, outputs), dtype=np.uint8)
    groups = format.groups(channels), outputs
    scales = rng.uniform(0.005, 0.02, groups).astype(NUMPY_DTYPES[scale_dtype])
    zeros = rng.integers(0, 2**format.bits + 1, groups, dtype=np.uint16)
    permutation = rng.permutation(channels).astype(np.int32) if permuted else None
    return _assemble(format, channels, codes, scales, zeros, permutation)


def integer_weight(
    rng: np.random.Generator, text: str, channels: int, outputs: int
) -> QuantizedTensor:
    """Weights whose values are small multiples of a half, so that products are exact."""
    format = WeightFormat.parse(text)
    middle = 2 ** (format.bits - 1)
    codes = rng.integers(middle - 4, middle + 4, _blocks(format, channels, outputs), dtype=np.uint8)
    groups = format.groups(channels), outputs
    scales = rng.choice([0.5, 1.0, 2.0], groups).astype(np.float16)
    zeros = rng.integers(middle - 2, middle + 3, groups, dtype=np.uint16)
    return _assemble(format, channels, codes, scales, zeros, None)


def _blocks(format: WeightFormat, channels: int, outputs: int) -> tuple[int, int, int, int]:
    return -(-channels // format.block), format.planes, outputs, format.plane_width


def _assemble(
    format: WeightFormat,
    channels: int,
    codes: np.ndarray,  # [blocks, planes, N, plane width]; random where K is padded
    scales: np.ndarray,
    zeros: np.ndarray,
    permutation: np.ndarray | None,
) -> QuantizedTensor:
    words = np.zeros((codes.shape[0], *codes.shape[2:]), np.uint16)
    for plane in range(format.planes):
        words |= codes[:, plane].astype(np.uint16) << (plane * format.bits)
    padding = 0
    if format.group_size is not None:
        padding = codes.shape[0] * format.block // format.group_size - len(scales)
    parameters = np.pad(parameter_words(scales, zeros), ((0, padding), (0, 0)))
    return QuantizedTensor(
        jnp.asarray(words),
        jnp.asarray(parameters),
        None if permutation is None else jnp.asarray(permutation),
        format,
        channels,
        scales.dtype.name,
    )


def dense(weight: QuantizedTensor) -> np.ndarray:
    """The exact matrix float64 [K, N], in the order of the input channels."""
    format, words = weight.format, np.asarray(weight.words)
    fields = [words >> (plane * format.bits) for plane in range(format.planes)]
    codes = (np.stack(fields, 1) % 2**format.bits).swapaxes(2, 3).reshape(-1, words.shape[1])
    parameters = np.asarray(weight.parameters)
    scales = (parameters % 2**16).astype(np.uint16).view(NUMPY_DTYPES[weight.scale_dtype])
    groups = codes.reshape(len(parameters), -1, words.shape[1]).astype(np.float64)
    values = (groups - (parameters >> 16)[:, None]) * scales.astype(np.float64)[:, None]
    values = values.reshape(codes.shape)[: weight.channels]
    if weight.permutation is None:
        return values
    restored = np.empty_like(values)
    restored[np.asarray(weight.permutation)] = values
    return restored


def weight_struct(text: str, channels: int, outputs: int) -> QuantizedTensor:
    """The shapes and dtypes of a packed weight, without its bytes."""
    format = WeightFormat.parse(text)
    parameters = (format.groups(channels), outputs)
    return jax.eval_shape(
        lambda *arrays: pack(*arrays, format),
        jax.ShapeDtypeStruct((channels, outputs), jnp.uint8),
        jax.ShapeDtypeStruct(parameters, jnp.float16),
        jax.ShapeDtypeStruct(parameters, jnp.uint8),
    )
