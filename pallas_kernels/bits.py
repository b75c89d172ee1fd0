"""Codes in 16-bit words: packing, unpacking, and the decoding that kernels do in registers.

A word holds 16 / bits codes, its *planes*: plane j is bits j·bits … (j+1)·bits − 1. Words form
arrays of the shape and element size of a 16-bit matrix operand, so the compiler moves them as it
moves bfloat16, and a decoded plane is already laid out for the tensor cores: the idea of
TurboMind's hardware-aware packing (section 4.1) in Triton's terms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend

WORD_BITS = 16

# The float whose lowest mantissa bits can be replaced by a code: 128 + q in bfloat16 (seven
# mantissa bits), 1024 + q in float16 (ten).
_MAGIC = {jnp.dtype(jnp.bfloat16): (0x4300, 128.0), jnp.dtype(jnp.float16): (0x6400, 1024.0)}


def planes_per_word(bits: int) -> int:
    """How many codes of `bits` bits a word holds."""
    return WORD_BITS // bits


def pack_planes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs unsigned codes [..., planes, width] into uint16 words [..., width]."""
    planes = planes_per_word(bits)
    if codes.shape[-2] != planes:
        raise ValueError(f"codes have {codes.shape[-2]} planes; {bits}-bit words hold {planes}")
    words = jnp.zeros(codes.shape[:-2] + codes.shape[-1:], jnp.uint16)
    for plane in range(planes):
        words |= codes[..., plane, :].astype(jnp.uint16) << jnp.uint16(plane * bits)
    return words


def unpack_planes(words: jax.Array, bits: int) -> jax.Array:
    """Unpacks uint16 words [..., width] into codes [..., planes, width], uint8 up to 8 bits."""
    shifts = jnp.arange(planes_per_word(bits), dtype=jnp.uint16) * jnp.uint16(bits)
    codes = (words[..., None, :] >> shifts[:, None]) & jnp.uint16(2**bits - 1)
    return codes.astype(jnp.uint8)


def pack_pair(low: jax.Array, high: jax.Array) -> jax.Array:
    """Two 16-bit arrays as one uint32 array: narrower loads are not pipelined on the GPU."""
    low, high = (
        jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in (low, high)
    )
    return low | (high << jnp.uint32(16))


def unpack_pair(
    pair: jax.Array, low: jax.typing.DTypeLike, high: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The halves of `pack_pair` as arrays of the 16-bit dtypes `low` and `high`."""

    def half(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.dtype(dtype))

    return half(pair & jnp.uint32(0xFFFF), low), half(pair >> jnp.uint32(16), high)


def decode_plane(
    words: jax.Array, plane: int, bits: int, zero: jax.Array, *, ptx: bool
) -> jax.Array:
    """The values code − zero of one plane, exact, in the dtype of `zero` (bfloat16 or float16).

    words: uint16 tile; zero: broadcastable to it, integers in 0 … 2**bits (exact in both dtypes).
    Runs inside a kernel. With `ptx` it is inline assembly on pairs of words (TurboMind §4.3:
    a code becomes a float by setting an exponent above it); without, its twin in jnp.
    """
    zero = jnp.broadcast_to(zero, words.shape)
    if not ptx:
        codes = (words >> jnp.uint16(plane * bits)) & jnp.uint16(2**bits - 1)
        return (codes.astype(jnp.float32) - zero.astype(jnp.float32)).astype(zero.dtype)
    magic, offset = _MAGIC[jnp.dtype(zero.dtype)]
    if bits == 8 and zero.dtype == jnp.bfloat16:
        return _decode_byte_bfloat16(words, plane, zero)
    # One logical operation gives offset + q; adding −(offset + zero), itself exact, leaves
    # q − zero.
    correction = -(zero + jnp.asarray(offset, zero.dtype))
    suffix = "bf16x2" if zero.dtype == jnp.bfloat16 else "f16x2"
    one = "0x3F803F80" if zero.dtype == jnp.bfloat16 else "0x3C003C00"
    mask = 2**bits - 1
    assembly = f"""{{
        .reg .b32 t, one;
        mov.b32 one, {one};
        shr.b32 t, $1, {plane * bits};
        lop3.b32 t, t, 0x{mask:04X}{mask:04X}, 0x{magic:04X}{magic:04X}, 0xEA;
        fma.rn.{suffix} $0, t, one, $2;
    }}"""
    return backend.inline_ptx(assembly, words, correction, dtype=zero.dtype)


def _decode_byte_bfloat16(words: jax.Array, plane: int, zero: jax.Array) -> jax.Array:
    # Seven mantissa bits can't hold a byte: decode its low seven bits as 128 + q', and let the
    # top bit choose what is subtracted, 256 or 128, which leaves q − 128.
    assembly = f"""{{
        .reg .b32 t, low, top, one;
        mov.b32 one, 0x3F803F80;
        shr.b32 t, $1, {plane * 8};
        lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 top, t, 0x00800080, 0xC380C380, 0x6A;
        fma.rn.bf16x2 t, low, one, top;
        fma.rn.bf16x2 $0, t, one, $2;
    }}"""
    correction = jnp.asarray(128, zero.dtype) - zero
    return backend.inline_ptx(assembly, words, correction, dtype=zero.dtype)


def decode_centred(
    words: jax.Array, plane: int, bits: int, dtype: jax.typing.DTypeLike, *, ptx: bool
) -> jax.Array:
    """The values code − 2**(bits − 1) of one plane, exact, in bfloat16 or float16.

    `decode_plane` with the zero point in the middle, where a byte in bfloat16 costs an instruction
    less: what its top bit chooses to subtract is right already.
    """
    dtype = jnp.dtype(dtype)
    if not ptx or bits != 8 or dtype != jnp.bfloat16:
        centre = jnp.asarray(2 ** (bits - 1), dtype)
        return decode_plane(words, plane, bits, centre, ptx=ptx)
    assembly = f"""{{
        .reg .b32 t, low, top, one;
        mov.b32 one, 0x3F803F80;
        shr.b32 t, $1, {plane * 8};
        lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 top, t, 0x00800080, 0xC380C380, 0x6A;
        fma.rn.bf16x2 $0, low, one, top;
    }}"""
    return backend.inline_ptx(assembly, words, dtype=dtype)


def decode_scaled(
    words: jax.Array, plane: int, bits: int, step: jax.Array, zero: jax.Array, *, ptx: bool
) -> jax.Array:
    """The values code · step + zero of one plane, rounded once, in the dtype of step and zero.

    words: uint16 tile; step, zero: broadcastable to it, bfloat16 or float16. Runs inside a kernel.
    The code itself is made first: step times a bias, or zero with one, would be rounded. What
    rounding takes beyond float16 stays at its end.
    """
    dtype = jnp.dtype(step.dtype)
    step, zero = (jnp.broadcast_to(x, words.shape) for x in (step, zero))
    if not ptx:
        codes = ((words >> jnp.uint16(plane * bits)) & jnp.uint16(2**bits - 1)).astype(jnp.float32)
        values = codes * step.astype(jnp.float32) + zero.astype(jnp.float32)
        return jnp.minimum(values, float(jnp.finfo(dtype).max)).astype(dtype)
    magic, _ = _MAGIC[dtype]
    mask = 2**bits - 1
    if dtype == jnp.bfloat16:
        suffix, one, bias, end = "bf16x2", "0x3F803F80", "0xC300C300", "mov.b32 $0, t;"
    else:
        suffix, one, bias, end = "f16x2", "0x3C003C00", "0xE400E400", "min.f16x2 $0, t, largest;"
    decode = f"""
        lop3.b32 t, t, 0x{mask:04X}{mask:04X}, 0x{magic:04X}{magic:04X}, 0xEA;
        mov.b32 bias, {bias};"""
    if bits == 8 and dtype == jnp.bfloat16:  # as in `decode_centred`, to which 128 are added
        decode = """
        lop3.b32 bias, t, 0x00800080, 0xC380C380, 0x6A;
        lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;
        fma.rn.bf16x2 t, t, one, bias;
        mov.b32 bias, 0x43004300;"""
    assembly = f"""{{
        .reg .b32 t, bias, one, largest;
        mov.b32 one, {one};
        mov.b32 largest, 0x7BFF7BFF;
        shr.b32 t, $1, {plane * bits};{decode}
        fma.rn.{suffix} t, t, one, bias;
        fma.rn.{suffix} t, t, $2, $3;
        {end}
    }}"""
    return backend.inline_ptx(assembly, words, step, zero, dtype=dtype)


def multiply(tile: jax.Array, scale: jax.Array, *, ptx: bool) -> jax.Array:
    """Tile · scale in the dtype of the tile, two elements per instruction; runs inside a kernel."""
    scale = jnp.broadcast_to(scale.astype(tile.dtype), tile.shape)
    if not ptx:
        return (tile.astype(jnp.float32) * scale.astype(jnp.float32)).astype(tile.dtype)
    suffix = "bf16x2" if tile.dtype == jnp.bfloat16 else "f16x2"
    # Adding −0 changes nothing; the plain product of bfloat16 needs compute capability 9.0.
    assembly = f"""{{
        .reg .b32 zero;
        mov.b32 zero, 0x80008000;
        fma.rn.{suffix} $0, $1, $2, zero;
    }}"""
    return backend.inline_ptx(assembly, tile, scale, dtype=tile.dtype)
