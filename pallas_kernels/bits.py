"""Codes in 16-bit words: packing, unpacking, and the decoding that kernels do in registers.

A word holds 16 / bits codes, its *planes*: plane j is bits j·bits … (j+1)·bits − 1. Words form
arrays of the shape and element size of a 16-bit matrix operand, so the compiler moves them as it
moves bfloat16, and a decoded plane is already laid out for the tensor cores: the idea of
TurboMind's hardware-aware packing (section 4.1) in Triton's terms. Each decoder is inline PTX where
the target has any, and its twin in jnp elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target

WORD_BITS = 16

# 1024 + q in float16: its ten lowest bits can be replaced by a code.
_MAGIC, _OFFSET = 0x6400, 1024.0

# What the lowest bit of a subnormal is worth, as a power of two.
_LOWEST_EXPONENT = {jnp.dtype(jnp.bfloat16): -133, jnp.dtype(jnp.float16): -24}


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
    words = words[..., None, :]
    codes = words >> jax.lax.broadcast_to_rank(shifts[:, None], words.ndim)
    codes &= jnp.uint16(2**bits - 1)
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


def widen_pair(pair: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The halves of `pack_pair`, both of a 16-bit dtype, in float32."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        low, high = unpack_pair(pair, dtype, dtype)
        return low.astype(jnp.float32), high.astype(jnp.float32)
    # A bfloat16 is the upper half of a float32.
    halves = pair << jnp.uint32(16), pair & jnp.uint32(0xFFFF0000)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves)
    return low, high


def decode_plane(words: jax.Array, plane: int, bits: int, zero: jax.Array) -> jax.Array:
    """(Code − zero) · 2**`plane_exponent` of one plane, exact, in the dtype of `zero`.

    words: uint16 tile; bits: a divisor of 8; zero: bfloat16 or float16, broadcastable to the tile,
    integers in 0 … 2**bits (exact in both dtypes). Runs inside a kernel. The PTX works on pairs of
    words: it leaves a code where it is in its byte, and makes up for its place in the multiply-add
    that subtracts the zero point. In float16 an exponent is set above the code (TurboMind section
    4.3), in bfloat16, which has no room for that, a code is a subnormal.
    """
    dtype = jnp.dtype(zero.dtype)
    target = current_target()
    zero = zero * jnp.asarray(2.0 ** plane_exponent(dtype), dtype)
    if not target.has_ptx:
        codes = (words >> jnp.uint16(plane * bits)) & jnp.uint16(2**bits - 1)
        codes = codes.astype(dtype) * jnp.asarray(2.0 ** plane_exponent(dtype), dtype)
        return codes - jnp.broadcast_to(zero, words.shape)
    shift = plane * bits % 8
    if dtype == jnp.bfloat16:
        above, suffix = 0, "bf16x2"
        factor = (254 - shift) << 7  # 2**(127 - shift), the largest power for a shift of 0
    else:
        above, suffix = _MAGIC, "f16x2"
        factor = (15 - shift) << 10  # 2**-shift
        zero = zero + jnp.asarray(_OFFSET * 2.0**-shift, dtype)
    assembly = f"""{{
        .reg .b32 t, factor;
        mov.b32 factor, 0x{factor:04X}{factor:04X};
        {_pick(plane, bits, above)}
        fma.rn.{suffix} $0, t, factor, $2;
    }}"""
    return target.inline_ptx(assembly, words, jnp.broadcast_to(-zero, words.shape), dtype=dtype)


def _pick(plane: int, bits: int, above: int = 0) -> str:
    """PTX: t is a plane of $1, where it stands in its byte, beneath the upper byte of `above`."""
    byte, shift = divmod(plane * bits, 8)
    if bits == 8:  # one instruction, where a shift and a mask are two
        return f"prmt.b32 t, $1, 0x{above:04X}{above:04X}, 0x{0x5250 + 0x0101 * byte:04X};"
    mask = (2**bits - 1) << shift
    return f"""shr.b32 t, $1, {8 * byte};
        lop3.b32 t, t, 0x{mask:04X}{mask:04X}, 0x{above:04X}{above:04X}, 0xEA;"""


def plane_exponent(dtype: jax.typing.DTypeLike) -> int:
    """Of two: what one is worth in `decode_plane`."""
    # No factor is larger than 2**127, and a code of one, in bfloat16, is 2**-133.
    return -6 if jnp.dtype(dtype) == jnp.bfloat16 else 0


def decode_in_place(
    words: jax.Array,
    plane: int,
    bits: int,
    dtype: jax.typing.DTypeLike,
    *,
    offset: float = 0,
    copy: int = 0,
) -> jax.Array:
    """(Code − offset) · 2**`exponent_in_place` of one plane, exact, in 16 bits.

    A code is left where it is in its byte, and the byte is read as a float: from zero to the end
    of the first normal binade, floats are multiples of the smallest subnormal, which the tensor
    cores keep. So a code costs one logical operation for each pair, and in float16 another
    instruction if there is an offset (`offset`). Runs inside a kernel.

    offset: a multiple of a half.
    copy: another number for each product that the tile is in. Triton takes what two products share
    through shared memory; what the assembler finds to be alike it computes once.
    """
    target = current_target()
    byte, shift = divmod(plane * bits, 8)
    mask = (2**bits - 1) << shift
    if not target.has_ptx:  # XLA takes subnormals for zeros on the CPU
        codes = ((words >> jnp.uint16(8 * byte)) & jnp.uint16(mask)).astype(dtype)
        if not offset:
            return codes
        return codes * jnp.asarray(2.0**-shift, dtype) - jnp.asarray(offset, dtype)
    # In halves of codes, so that their middle is a number of them.
    factor, less = (16 - shift) << 10, 0x8000 | int(2 * offset)
    centre = f"""
        mov.b32 factor, 0x{factor:04X}{factor:04X};
        mov.b32 less, 0x{less:04X}{less:04X};
        fma.rn.f16x2 t, t, factor, less;"""
    assembly = f"""{{  // copy {copy}
        .reg .b32 t, factor, less;
        {_pick(plane, bits)}{centre if offset else ""}
        mov.b32 $0, t;
    }}"""
    return target.inline_ptx(assembly, words, dtype=dtype)


def offset(bits: int, dtype: jax.typing.DTypeLike) -> float:
    """What is better subtracted from codes of which many are summed: their middle, or none.

    Tensor cores cut what they sum off, towards zero, where others round. What all codes have in
    common makes sums larger, and gives what is cut off one sign: too much for float16, in means of
    131,072 values, which all but cancel.
    """
    return (2**bits - 1) / 2 if jnp.dtype(dtype) == jnp.float16 else 0


def exponent_in_place(
    plane: int, bits: int, dtype: jax.typing.DTypeLike, *, offset: float = 0
) -> int:
    """Of two: what a code of one is worth in `decode_in_place`."""
    has_ptx = current_target().has_ptx
    # The instruction that takes the offset away makes up for the place in the byte.
    place = int(has_ptx) if offset else plane * bits % 8
    return place + (_LOWEST_EXPONENT[jnp.dtype(dtype)] if has_ptx else 0)


def decode_scaled(
    words: jax.Array, plane: int, bits: int, step: jax.Array, zero: jax.Array
) -> jax.Array:
    """Code · step · 2**`exponent_scaled` + zero of one plane, rounded once.

    words: uint16 tile; step, zero: broadcastable to it, bfloat16 or float16. Runs inside a kernel.
    What rounding takes above float16 stays at its end.
    """
    target, dtype = current_target(), jnp.dtype(step.dtype)
    if not target.has_ptx:
        codes = ((words >> jnp.uint16(plane * bits)) & jnp.uint16(2**bits - 1)).astype(jnp.float32)
        values = codes * step.astype(jnp.float32) + zero.astype(jnp.float32)
        return jnp.minimum(values, float(jnp.finfo(dtype).max)).astype(dtype)
    if dtype == jnp.bfloat16:
        exponent = exponent_scaled(dtype) - exponent_in_place(plane, bits, dtype)
        step = step * jnp.asarray(2.0**exponent, dtype)
        codes = decode_in_place(words, plane, bits, dtype)
        step, zero = (jnp.broadcast_to(x, words.shape) for x in (step, zero))
        return target.inline_ptx("fma.rn.bf16x2 $0, $1, $2, $3;", codes, step, zero, dtype=dtype)
    # Steps have no room in float16 for such an exponent. So the code itself is made first: step
    # times a bias, or zero with one, would be rounded.
    step, zero = (jnp.broadcast_to(x, words.shape) for x in (step, zero))
    shift = plane * bits % 8
    factor, bias = (15 - shift) << 10, 0xE400 - (shift << 10)
    assembly = f"""{{
        .reg .b32 t, factor, bias, largest;
        mov.b32 factor, 0x{factor:04X}{factor:04X};
        mov.b32 bias, 0x{bias:04X}{bias:04X};
        mov.b32 largest, 0x7BFF7BFF;
        {_pick(plane, bits, _MAGIC)}
        fma.rn.f16x2 t, t, factor, bias;
        fma.rn.f16x2 t, t, $2, $3;
        min.f16x2 $0, t, largest;
    }}"""
    return target.inline_ptx(assembly, words, step, zero, dtype=dtype)


def exponent_scaled(dtype: jax.typing.DTypeLike) -> int:
    """Of two: what one is worth in `decode_scaled`."""
    return -64 if current_target().has_ptx and jnp.dtype(dtype) == jnp.bfloat16 else 0


def multiply(
    tile: jax.Array, scale: jax.Array, plus: jax.Array | None = None, *, copy: int = 0
) -> jax.Array:
    """Tile · scale, plus what is given, rounded once to the dtype of the tile.

    Two elements per instruction; runs inside a kernel. copy: as in `decode_in_place`.
    """
    target = current_target()
    operands = [scale] if plus is None else [scale, plus]
    operands = [jnp.broadcast_to(x.astype(tile.dtype), tile.shape) for x in operands]
    if not target.has_ptx:
        wide, *rest = (x.astype(jnp.float32) for x in operands)
        return sum(rest, tile.astype(jnp.float32) * wide).astype(tile.dtype)
    suffix = "bf16x2" if tile.dtype == jnp.bfloat16 else "f16x2"
    # Adding −0 changes nothing; the plain product of bfloat16 needs compute capability 9.0.
    assembly = f"""{{  // copy {copy}
        .reg .b32 zero;
        mov.b32 zero, 0x80008000;
        fma.rn.{suffix} $0, $1, $2, {"zero" if plus is None else "$3"};
    }}"""
    return target.inline_ptx(assembly, tile, *operands, dtype=tile.dtype)


def multiply_exactly(tile: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Tile · scale as the sum of two terms in the dtype of the tile; runs inside a kernel.

    The terms are the rounded product, and what rounding took away, which 16 bits hold unless the
    product is close to the dtype's subnormals.
    """
    target = current_target()
    product = multiply(tile, scale)
    scale = jnp.broadcast_to(scale.astype(tile.dtype), tile.shape)
    if not target.has_ptx:
        exact = tile.astype(jnp.float32) * scale.astype(jnp.float32)
        return [product, (exact - product.astype(jnp.float32)).astype(tile.dtype)]
    suffix = "bf16x2" if tile.dtype == jnp.bfloat16 else "f16x2"
    assembly = f"""{{
        .reg .b32 less;
        neg.{suffix} less, $3;
        fma.rn.{suffix} $0, $1, $2, less;
    }}"""
    return [product, target.inline_ptx(assembly, tile, scale, product, dtype=tile.dtype)]
