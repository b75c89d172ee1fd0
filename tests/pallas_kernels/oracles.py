"""The kernels' results, in numpy, written from the layouts in the docstrings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.kernels import PlainCodes, QuantizedTensor, WeightFormat, pack
from tests.sweeps import in_sweep

NUMPY_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
WEIGHT_FORMATS = tuple(
    f"{codes}:g{size}" for codes in ("uint4", "uint8") for size in (32, 64, 128, "K")
)

# Every legal format, written in full.
ALL_FORMATS = (
    *(text + suffix for text in WEIGHT_FORMATS for suffix in ("", ":sym")),
    *(f"affine{bits}:g{size}" for bits in (4, 8) for size in (32, 64, 128)),
    *(f"table{bits}:g{size}" for bits in (4, 3, 2) for size in (32, 64, 128, 256)),
    *("float8:g128", "float8:gK", "float8:g128/float8", "float8:gK/float8", "float4:g32"),
    *("int8:gK/int8", "int4:g128/int8", "liquid4:g64/int8", "bfloat16", "float16"),
)
PACKED_FORMATS = ALL_FORMATS[:-2]
# Formats that differ from affine4:g32 or affine8:g64 in the size of groups alone.
ALIKE = ("affine4:g64", "affine4:g128", "affine8:g32", "affine8:g128")


def most_formats(formats: Sequence[str]) -> list[Any]:
    """Cases of `parametrize`, of which the formats that are like others are in the sweep."""
    return [in_sweep(text) if text in ALIKE else text for text in formats]


# The values of e2m1's codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

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


def nibble_words(codes: np.ndarray) -> np.ndarray:
    """uint8 words [blocks, N, 64] of codes [K, N]: channels 0 … 63 of 128 in the low nibbles."""
    channels, outputs = codes.shape
    words = np.zeros((-(-channels // 128), outputs, 64), np.uint8)
    for channel in range(channels):
        block, rest = divmod(channel, 128)
        words[block, :, rest % 64] |= codes[channel].astype(np.uint8) << (rest // 64 * 4)
    return words


def table_words(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    """uint16 words [blocks, N, columns · width] of codes [K, N], as `codes/table.py` lays them out.

    A register is the words of lanes 2i and 2i + 1; a code goes to its nibble of a register.
    """
    columns = 3 if bits == 3 else 1
    block_size = columns * 16 // bits * width
    channels, outputs = codes.shape
    words = np.zeros((-(-channels // block_size), outputs, columns, width), np.uint16)
    for channel in range(channels):
        block, rest = divmod(channel, block_size)
        plane, lane = divmod(rest, width)
        quad, nibble = plane // 4, plane % 4 * 2 + lane % 2
        word, place = lane // 2 * 2 + nibble // 4, nibble % 4 * 4
        code = codes[channel].astype(np.uint16)
        if bits == 3 and quad == 3:
            for column in range(3):
                words[block, :, column, word] |= (code >> column & 1) << (place + 3)
        elif bits == 2:
            words[block, :, quad // 2, word] |= code << (place + quad % 2 * 2)
        else:
            words[block, :, quad, word] |= code << place
    return words.reshape(*words.shape[:2], -1)


def table_codes(columns: list[np.ndarray], plane: int, bits: int) -> np.ndarray:
    """Codes [..., width] of one plane of words [..., width] that `table_words` packed."""
    codes = np.empty(columns[0].shape, np.uint16)
    quad = plane // 4
    for lane in range(codes.shape[-1]):
        nibble = plane % 4 * 2 + lane % 2
        fields = [c[..., lane // 2 * 2 + nibble // 4] >> (nibble % 4 * 4) & 15 for c in columns]
        if bits == 3 and quad == 3:
            codes[..., lane] = sum((f >> 3) << column for column, f in enumerate(fields))
        elif bits == 2:
            codes[..., lane] = fields[quad // 2] >> (quad % 2 * 2) & 3
        else:
            codes[..., lane] = fields[quad] & (2**bits - 1)
    return codes


def exponent_words(scales: np.ndarray) -> np.ndarray:
    """The words uint32 [ceil(groups / 4), N] of scales [groups, N] that are powers of two."""
    exponents = (np.log2(wide(scales)) + 127).astype(np.uint32)
    exponents = np.pad(exponents, ((0, -len(exponents) % 4), (0, 0)))
    return sum(exponents[i::4] << np.uint32(8 * i) for i in range(4))


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


_pack = jax.jit(pack)


@dataclasses.dataclass(frozen=True)
class PlainWeight:
    """PlainCodes in numpy, and what is expected of them once they are packed."""

    format: WeightFormat
    codes: np.ndarray  # [K, N]
    scales: np.ndarray  # [groups, N]
    zeros: np.ndarray | None = None  # [groups, N]
    channel_scales: np.ndarray | None = None  # [N]
    table: np.ndarray | None = None  # [2**bits]

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        format: WeightFormat,
        channels: int,
        outputs: int,
        scale_dtype: str = "float16",
    ) -> PlainWeight:
        """Everything over its whole range, but no NaN and no value outside of int8."""
        shape, group_shape = (channels, outputs), (format.groups(channels), outputs)
        scales = rng.uniform(0.005, 0.02, group_shape) * rng.choice([-1, 1], group_shape)
        codes = rng.integers(0, 2**format.bits, shape).astype(np.uint8)
        if format.codes in ("float8", "int8"):
            if format.codes == "float8":
                codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
            dtype = ml_dtypes.float8_e4m3fn if format.codes == "float8" else np.int8
            return cls(format, codes.view(dtype), scales.astype(np.float32))
        if format.codes == "int4":
            return cls(format, codes.view(np.int8) - np.int8(8), scales.astype(np.float32))
        if format.codes == "liquid4":
            steps = rng.integers(1, 17, group_shape).astype(np.uint16)
            offsets = rng.integers(9, 256 - 15 * steps).clip(9, 247).astype(np.uint16)
            return cls(format, codes, steps, offsets, np.abs(scales[0]).astype(np.float32))
        if format.codes == "float4":
            powers = 2.0 ** rng.integers(-12, 3, group_shape)
            return cls(format, codes, powers.astype(NUMPY_DTYPES["bfloat16"]))
        if format.codes.startswith("affine"):
            scales, minima = scales.astype(np.float16), rng.uniform(-1, 1, group_shape)
            return cls(format, codes, scales, minima.astype(np.float16))
        scales = scales.astype(NUMPY_DTYPES[scale_dtype])
        if format.codes.startswith("table"):
            table = rng.standard_normal(2**format.bits).astype(np.float32)
            return cls(format, codes, scales, table=table)
        if format.symmetric:
            return cls(format, codes, scales)
        zeros = rng.integers(0, 2**format.bits + 1, group_shape).astype(np.uint16)
        return cls(format, codes, scales, zeros)

    def words(self) -> np.ndarray:
        """The words, as QuantizedTensor describes them."""
        format = self.format
        if format.codes == "int4":
            return nibble_words(self.codes.view(np.uint8) & 15)
        if format.operand and format.codes != "liquid4":
            return np.pad(self.codes, ((0, -len(self.codes) % 128), (0, 0))).T[None]
        width = min(format.group_size or 64, 64)
        if format.codes == "liquid4":
            return nibble_words(self.codes)
        if format.codes.startswith("table"):
            width = 32 if format.bits == 3 else width
            return table_words(self.codes, format.bits, width)
        return plane_words(self.codes.view(np.uint8), format.bits, width)

    def parameters(self) -> np.ndarray:
        """The parameters, as QuantizedTensor describes them, without the groups of padding."""
        if self.scales.dtype == np.float32:
            return self.scales.view(np.uint32)
        if self.format.codes == "liquid4":  # a byte each, of two groups
            halves = self.scales + 256 * self.zero_points().astype(np.uint16)
            halves = np.pad(halves, ((0, len(halves) % 2), (0, 0)))
            return parameter_words(halves[0::2], halves[1::2])
        if self.format.codes == "float4":
            return exponent_words(self.scales)
        return parameter_words(self.scales, self.zero_points())

    def zero_points(self) -> np.ndarray:
        """uint16 [groups, N]; of symmetric codes the middle, and 0 where codes have none."""
        middle = 2 ** (self.format.bits - 1) if self.format.symmetric else 0
        return np.full(self.scales.shape, middle, np.uint16) if self.zeros is None else self.zeros

    def values(self) -> np.ndarray:
        """float64 [K, N], rounded once to float32 as the last product is."""
        size = self.format.group_size or len(self.codes)
        scales = np.repeat(wide(self.scales), size, axis=0)[: len(self.codes)]
        if self.format.codes.startswith("table"):
            assert self.table is not None
            product = wide(self.table)[self.codes] * scales
        elif self.format.codes == "liquid4":
            assert self.zeros is not None
            assert self.channel_scales is not None
            offsets = np.repeat(wide(self.zeros), size, axis=0)
            product = (wide(self.codes) * scales + offsets - 128) * wide(self.channel_scales)
        elif self.format.codes.startswith("affine"):
            assert self.zeros is not None
            product = wide(self.codes) * scales + np.repeat(wide(self.zeros), size, axis=0)
        elif self.format.codes == "float4":
            product = E2M1[self.codes] * scales
        elif self.format.codes.startswith("uint"):
            product = dequantized(self.codes, self.scales, self.zero_points())
        else:
            product = wide(self.codes) * scales
        return wide(product.astype(np.float32))

    def plain(self, permutation: np.ndarray | None = None) -> PlainCodes:
        """The type of the library."""
        return PlainCodes(**vars(self), permutation=permutation)

    def pack(self, permutation: np.ndarray | None = None) -> QuantizedTensor:
        """By the function under test."""
        return _pack(self.plain(permutation))


# Tokens that share a channel's scale, by the names of keys that have such.
KEY_GROUPS = {"4c": 128, "4cg64": 64, "4cg32": 32, "2": 128, "2g64": 64, "2g32": 32}


class KVSide(NamedTuple):
    """Keys or values as the cache stores them, and what they decode to."""

    words: np.ndarray  # [..., dim / planes]
    parameters: np.ndarray | None  # uint32 [...], of tokens, or [..., groups, dim], of channels
    decoded: np.ndarray  # float64 [..., dim]


def kv_encoded(
    x: np.ndarray, bits: int, dtype: np.dtype | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint16 [..., dim], scale and zero [...] in a dtype, or that of x, per vector of x."""
    dtype = dtype or (x.dtype if x.dtype.itemsize == 2 else np.dtype(np.float16))
    values = x.astype(np.float32)
    low, high = values.min(-1), values.max(-1)
    if dtype == np.float16:
        low, high = (np.clip(end, -65504, 65504) for end in (low, high))
    scale = ((high - low) * np.float32(1 / (2**bits - 1))).astype(dtype)
    scale = np.where(scale == 0, np.array(2.0**-14, dtype), scale)
    zero = low.astype(dtype)
    halves = values - zero.astype(np.float32)[..., None]
    halves *= (np.float32(2) / scale.astype(np.float32))[..., None]
    rounded = np.floor((np.floor(halves.astype(np.float64)) + 1) / 2)  # half up
    return np.clip(rounded, 0, 2**bits - 1).astype(np.uint16), scale, zero


def kv_side(x: np.ndarray, kind: str, scale: np.ndarray | None = None) -> KVSide:
    """The cache's content for x [..., dim], by the name of the codes: 16, 8, 8s, 4, 2 or fp8.

    scale: float32, broadcastable to x, of FP8 and 8s.
    """
    if kind == "16":
        return KVSide(x, None, x.astype(np.float64))
    if kind == "fp8":
        assert scale is not None
        scaled = x.astype(np.float32) * (np.float32(1) / scale)
        codes = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        words = kv_words(codes.view(np.uint8).astype(np.uint16), 8)
        return KVSide(words, None, codes.astype(np.float64) * scale.astype(np.float64))
    if kind == "8s":
        assert scale is not None
        halves = np.floor(np.clip(x.astype(np.float32) * (np.float32(2) / scale), -254, 254))
        signed = np.floor((halves + 1) / 2)
        words = kv_words((signed + 128).astype(np.uint16), 8)
        return KVSide(words, None, signed.astype(np.float64) * scale.astype(np.float64))
    codes, step, zero = kv_encoded(x, int(kind))
    decoded = codes * step.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    return KVSide(kv_words(codes, int(kind)), parameter_words(step, zero), decoded)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Channels that are dim / 2 apart, then dim / 4, ..., become sums and differences, over √n."""
    dim = x.shape[-1]
    count = max(n for n in (1 << i for i in range(20)) if dim % n == 0)
    y = wide(x) if x.dtype == np.float64 else x.astype(np.float32)
    for distance in (dim >> i for i in range(1, count.bit_length())):
        first, second = y.reshape(-1, 2, distance).swapaxes(0, 1)
        y = np.stack([first + second, first - second], 1).reshape(y.shape)
    return (y * y.dtype.type(count**-0.5)).astype(x.dtype)


def kv_key(x: np.ndarray, kind: str, scale: np.ndarray | None = None) -> KVSide:
    """The cache's content for keys x [..., dim] that are rounded token by token, by their name."""
    if kind != "4":
        return kv_side(x, kind.removesuffix("t"), scale)
    side = kv_side(hadamard(x), kind)
    return side._replace(decoded=hadamard(side.decoded))


def kv_keys(x: np.ndarray, kind: str, scale: np.ndarray | None = None) -> KVSide:
    """The cache's content for whole groups of keys x [..., tokens, dim], by their name."""
    if kind not in KEY_GROUPS:
        return kv_key(x, kind, scale)
    return kv_channels(x, kind, np.dtype(np.float16))


def kv_channels(x: np.ndarray, kind: str, dtype: np.dtype | None = None) -> KVSide:
    """The same for kinds with scales of channels, which are of a dtype, or that of x."""
    bits, group = int(kind[0]), KEY_GROUPS[kind]
    channels = np.moveaxis(x, -1, -2)
    channels = channels.reshape(*channels.shape[:-1], -1, group)  # [..., dim, groups, group]
    codes, step, zero = kv_encoded(channels, bits, dtype)
    decoded = codes * step.astype(np.float64)[..., None] + zero.astype(np.float64)[..., None]
    codes, decoded = (np.moveaxis(y.reshape(*y.shape[:-2], -1), -1, -2) for y in (codes, decoded))
    parameters = parameter_words(np.moveaxis(step, -1, -2), np.moveaxis(zero, -1, -2))
    return KVSide(kv_words(codes, bits), parameters, decoded)


def kv_values(x: np.ndarray, kind: str, scale: np.ndarray | None = None) -> KVSide:
    """The same for values, whose two bits have the scales of tokens."""
    return kv_channels(x, kind) if "c" in kind else kv_side(x, kind, scale)


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
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    chunked: bool = False,
) -> np.ndarray:
    """float64 attention, one query at a time; zeros where a query sees no key.

    queries [batch, tokens, heads, dim], keys and values [batch, keys, KV heads, dim], positions
    [batch, tokens], lengths [batch], sinks [heads].
    """
    out = np.zeros(queries.shape)
    group = queries.shape[2] // keys.shape[2]
    for b, t, h in np.ndindex(queries.shape[:3]):
        last = min(positions[b, t], lengths[b] - 1)
        first = 0 if window is None else max(0, positions[b, t] - window + 1)
        first = positions[b, t] - positions[b, t] % window if chunked else first
        if last < first:
            continue
        visible = slice(first, last + 1)
        scores = keys[b, visible, h // group] @ queries[b, t, h] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        extra = scores[:0] if sinks is None else wide(sinks)[h : h + 1]
        peak = np.concatenate([scores, extra]).max()
        weights = np.exp(scores - peak)
        total = weights.sum() + np.exp(extra - peak).sum()
        out[b, t, h] = weights @ values[b, visible, h // group] / total
    return out
