"""Codes in 16-bit words: packing, unpacking, and decoding in registers inside kernels.

A word has 16 / bits codes, one of each *plane*: plane j is bits j·bits … (j+1)·bits − 1. An array
of words has the shape and the element size of a 16-bit matrix operand. So the compiler moves words
as it moves bfloat16, and a decoded plane already has the layout of a tensor-core operand: the idea
of TurboMind's hardware-aware packing (section 4.1) in Triton's terms.

Each decoder is inline PTX if the current target has PTX, and an equivalent in jnp otherwise. In
PTX, some decoders return values that are scaled by a power of two, which saves instructions; a
function next to each (`plane_exponent`, `exponent_in_place`, `exponent_scaled`) returns the
exponent, by which the caller scales the sums back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels.target import current_target

WORD_BITS = 16

# The bits of 1024 in float16, and 1024. Replacing the lowest ten bits by a code gives 1024 + code.
_MAGIC, _OFFSET = 0x6400, 1024.0

# The exponent of the smallest subnormal, 2**exponent, of each dtype.
_LOWEST_EXPONENT = {jnp.dtype(jnp.bfloat16): -133, jnp.dtype(jnp.float16): -24}


def planes_per_word(bits: int) -> int:
    """The number of codes of `bits` bits in a word."""
    return WORD_BITS // bits


def pack_planes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs unsigned codes [..., planes, width] into uint16 words [..., width].

    Raises ValueError if `planes` is not the number of codes in a word.
    """
    planes = planes_per_word(bits)
    if codes.shape[-2] != planes:
        raise ValueError(f"codes have {codes.shape[-2]} planes; {bits}-bit words hold {planes}")
    words = jnp.zeros(codes.shape[:-2] + codes.shape[-1:], jnp.uint16)
    for plane in range(planes):
        words |= codes[..., plane, :].astype(jnp.uint16) << jnp.uint16(plane * bits)
    return words


def unpack_planes(words: jax.Array, bits: int) -> jax.Array:
    """Unpacks uint16 words [..., width] into uint8 codes [..., planes, width]; bits: at most 8."""
    shifts = jnp.arange(planes_per_word(bits), dtype=jnp.uint16) * jnp.uint16(bits)
    words = words[..., None, :]
    codes = words >> jax.lax.broadcast_to_rank(shifts[:, None], words.ndim)
    codes &= jnp.uint16(2**bits - 1)
    return codes.astype(jnp.uint8)


def pack_pair(low: jax.Array, high: jax.Array) -> jax.Array:
    """Packs two 16-bit arrays into one uint32 array of the same shape.

    The compiler does not pipeline loads of less than 32 bits a thread.
    """
    low, high = (
        jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in (low, high)
    )
    return low | (high << jnp.uint32(16))


def unpack_pair(
    pair: jax.Array, low: jax.typing.DTypeLike, high: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_pair`: two arrays of the 16-bit dtypes `low` and `high`."""

    def half(bits: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.dtype(dtype))

    return half(pair & jnp.uint32(0xFFFF), low), half(pair >> jnp.uint32(16), high)


def widen_pair(pair: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The two arrays of `pack_pair`, both of the 16-bit `dtype`, converted to float32."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        low, high = unpack_pair(pair, dtype, dtype)
        return low.astype(jnp.float32), high.astype(jnp.float32)
    # The bits of a bfloat16 are the upper half of the bits of the same float32.
    halves = pair << jnp.uint32(16), pair & jnp.uint32(0xFFFF0000)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves)
    return low, high


def decode_plane(words: jax.Array, plane: int, bits: int, zero: jax.Array) -> jax.Array:
    """Decodes one plane to (code − zero) · 2**`plane_exponent`, exact, in the dtype of `zero`.

    Runs inside a kernel.

    words: a tile of uint16.
    bits: of a code, a divisor of 8.
    zero: the zero points, integers in 0 … 2**bits in bfloat16 or float16 (both represent them
        exactly), broadcastable to the tile.

    The PTX processes two words at a time. It leaves a code at its bits in the byte; the
    multiply-add that subtracts the zero point also scales by the inverse of that shift. In float16
    the bits of 1024 are set above the code (TurboMind section 4.3). bfloat16's mantissa is too
    short for that, so the code is interpreted as a subnormal.
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
    """PTX that sets t to one plane of two words in $1, each code at its bits in its byte.

    above: the constant whose upper byte becomes the upper byte of each half of t.
    """
    byte, shift = divmod(plane * bits, 8)
    if bits == 8:  # one instruction instead of a shift and a mask
        return f"prmt.b32 t, $1, 0x{above:04X}{above:04X}, 0x{0x5250 + 0x0101 * byte:04X};"
    mask = (2**bits - 1) << shift
    return f"""shr.b32 t, $1, {8 * byte};
        lop3.b32 t, t, 0x{mask:04X}{mask:04X}, 0x{above:04X}{above:04X}, 0xEA;"""


def plane_exponent(dtype: jax.typing.DTypeLike) -> int:
    """The exponent of the power of two by which `decode_plane` scales its result."""
    # In bfloat16 a code of 1 is interpreted as 2**-133, and the largest factor is 2**127.
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
    """Decodes one plane to (code − offset) · 2**`exponent_in_place`, exact, in the 16-bit `dtype`.

    Runs inside a kernel. The PTX leaves a code at its bits in the byte and interprets the byte as a
    float: from zero to the end of the first normal binade, floats are multiples of the smallest
    subnormal, and tensor cores do not flush subnormals to zero. So two codes cost one logical
    operation, and in float16 a second instruction if there is an offset.

    offset: a multiple of a half; see the function `offset`.
    copy: a different number for each product that uses the tile. Triton passes a tile that two
        products share through shared memory. The number makes the assembly differ, so that Triton
        sees two tiles; the assembler recognises the same instructions and computes them once.
    """
    target = current_target()
    byte, shift = divmod(plane * bits, 8)
    mask = (2**bits - 1) << shift
    if not target.has_ptx:  # integers, not subnormals, which XLA flushes to zero on the CPU
        codes = ((words >> jnp.uint16(8 * byte)) & jnp.uint16(mask)).astype(dtype)
        if not offset:
            return codes
        return codes * jnp.asarray(2.0**-shift, dtype) - jnp.asarray(offset, dtype)
    # Half a code is float16's smallest subnormal, so that the offset, a multiple of 1/2 such as
    # 7.5, is an integer number of subnormals.
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
    """The number to subtract from codes before many are summed: their middle in float16, else 0.

    Tensor cores truncate their sums towards zero instead of rounding them. Codes that are not
    centred make sums larger, so that truncation errors are larger, and all of one sign. In float16
    the mean of many values that nearly cancel would lose too much precision.
    """
    return (2**bits - 1) / 2 if jnp.dtype(dtype) == jnp.float16 else 0


def exponent_in_place(
    plane: int, bits: int, dtype: jax.typing.DTypeLike, *, offset: float = 0
) -> int:
    """The exponent of the power of two by which `decode_in_place` scales a code."""
    has_ptx = current_target().has_ptx
    # The instruction that subtracts the offset also undoes the shift of the code in its byte.
    place = int(has_ptx) if offset else plane * bits % 8
    return place + (_LOWEST_EXPONENT[jnp.dtype(dtype)] if has_ptx else 0)


def decode_scaled(
    words: jax.Array, plane: int, bits: int, step: jax.Array, zero: jax.Array
) -> jax.Array:
    """Decodes one plane to code · step · 2**`exponent_scaled` + zero, rounded once.

    Runs inside a kernel.

    words: a tile of uint16.
    step, zero: bfloat16 or float16, broadcastable to the tile. `zero` is not scaled here: the
        caller scales it by the same power of two.

    The result has the dtype of `step`, and in float16 is at most the largest finite value.
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
    # The range of float16 is too small to scale steps by such a power of two. So one multiply-add
    # first removes the 1024 from the code. Including that in step · 1024 or in the zero would round
    # them.
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
    """The exponent of the power of two by which `decode_scaled` scales code · step."""
    return -64 if current_target().has_ptx and jnp.dtype(dtype) == jnp.bfloat16 else 0


def multiply(
    tile: jax.Array, scale: jax.Array, plus: jax.Array | None = None, *, copy: int = 0
) -> jax.Array:
    """Tile · scale, or tile · scale + `plus`, rounded once to the dtype of the tile.

    Runs inside a kernel, two elements per instruction.

    scale, plus: broadcastable to the tile. copy: as in `decode_in_place`.
    """
    target = current_target()
    operands = [scale] if plus is None else [scale, plus]
    operands = [jnp.broadcast_to(x.astype(tile.dtype), tile.shape) for x in operands]
    if not target.has_ptx:
        wide, *rest = (x.astype(jnp.float32) for x in operands)
        return sum(rest, tile.astype(jnp.float32) * wide).astype(tile.dtype)
    suffix = "bf16x2" if tile.dtype == jnp.bfloat16 else "f16x2"
    # Without `plus`, a multiply-add of −0, which changes no value: a plain product of bfloat16
    # needs compute capability 9.0.
    assembly = f"""{{  // copy {copy}
        .reg .b32 zero;
        mov.b32 zero, 0x80008000;
        fma.rn.{suffix} $0, $1, $2, {"zero" if plus is None else "$3"};
    }}"""
    return target.inline_ptx(assembly, tile, *operands, dtype=tile.dtype)


def multiply_exactly(tile: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Tile · scale as a list of two terms in the dtype of the tile, whose sum is the exact product.

    Runs inside a kernel. The first term is the rounded product, the second its rounding error,
    which 16 bits hold exactly unless the product is close to the dtype's subnormals.
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
