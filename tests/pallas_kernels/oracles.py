"""What the kernels must compute, in numpy, written from the layouts in the docstrings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

NUMPY_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
WEIGHT_FORMATS = tuple(
    f"{codes}:g{size}" for codes in ("uint4", "uint8") for size in (32, 64, 128, "K")
)

# Compiler options for programs that run once: on a CPU, most of a test's time is LLVM's.
QUICK = (
    {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    if jax.default_backend() == "cpu"
    else None
)

# mean|Δ| / mean|reference| that a 16-bit kernel may be off, against float64.
GATES = {"bfloat16": 8e-3, "float16": 1e-3}


def as_array(x: np.ndarray, dtype: str) -> jax.Array:
    """In another dtype; converted by numpy, since JAX would compile a program for every shape."""
    return jnp.asarray(x.astype(NUMPY_DTYPES.get(dtype, dtype)))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Standard normal values."""
    return as_array(rng.standard_normal(shape), dtype)


def wide(x: jax.Array | np.ndarray) -> np.ndarray:
    """As float64."""
    return np.asarray(x).astype(np.float64)


def relative_error(actual: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    """mean|Δ| / mean|expected|, and infinite where `actual` is not finite."""
    found = wide(actual)
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return np.inf
    return float(np.abs(found - expected).mean() / np.abs(expected).mean())


def plane_words(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    """uint16 words [blocks, N, width] of codes [K, N], K padded with zeros to whole blocks."""
    planes = 16 // bits
    channels, outputs = codes.shape
    words = np.zeros((-(-channels // (planes * width)), outputs, width), np.uint16)
    for channel in range(channels):
        block, rest = divmod(channel, planes * width)
        plane, lane = divmod(rest, width)
        words[block, :, lane] |= codes[channel].astype(np.uint16) << (plane * bits)
    return words


def parameter_words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """uint32: the 16 bits of `low` below those of `high`."""
    return low.view(np.uint16).astype(np.uint32) + high.view(np.uint16).astype(np.uint32) * 65536


def dequantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """float64 [K, N]: (code − zero) · scale, the groups being runs of K / groups channels."""
    size = codes.shape[0] // scales.shape[0]
    values = np.empty(codes.shape)
    for channel in range(codes.shape[0]):
        group = channel // size
        difference = codes[channel].astype(np.float64) - zeros[group].astype(np.float64)
        values[channel] = difference * scales[group].astype(np.float64)
    return values


def kv_encoded(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint16 [..., dim], scale and zero [...] in the dtype of x, per vector of x."""
    dtype = x.dtype if x.dtype.itemsize == 2 else np.dtype(np.float16)
    values = x.astype(np.float32)
    low, high = values.min(-1), values.max(-1)
    scale = ((high - low) * np.float32(1 / (2**bits - 1))).astype(dtype)
    scale = np.where(scale == 0, np.ones((), dtype), scale)
    zero = low.astype(dtype)
    halves = values - zero.astype(np.float32)[..., None]
    halves *= (np.float32(2) / scale.astype(np.float32))[..., None]
    rounded = np.floor((np.floor(halves.astype(np.float64)) + 1) / 2)  # half up
    return np.clip(rounded, 0, 2**bits - 1).astype(np.uint16), scale, zero


def kv_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words [..., dim / planes]: bits j·b … of word w are channel j · dim / planes + w."""
    width = codes.shape[-1] * bits // 16
    words = np.zeros((*codes.shape[:-1], width), np.uint16)
    for channel in range(codes.shape[-1]):
        words[..., channel % width] |= codes[..., channel] << (channel // width * bits)
    return words


def softmax_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    window: int | None = None,
) -> np.ndarray:
    """float64 attention, one query at a time; zeros where a query sees no key.

    queries [batch, tokens, heads, dim], keys and values [batch, keys, KV heads, dim], positions
    [batch, tokens], lengths [batch].
    """
    out = np.zeros(queries.shape)
    group = queries.shape[2] // keys.shape[2]
    for b, t, h in np.ndindex(queries.shape[:3]):
        last = min(positions[b, t], lengths[b] - 1)
        first = 0 if window is None else max(0, positions[b, t] - window + 1)
        if last < first:
            continue
        visible = slice(first, last + 1)
        scores = keys[b, visible, h // group] @ queries[b, t, h] * scale
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ values[b, visible, h // group] / weights.sum()
    return out
