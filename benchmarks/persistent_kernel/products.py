"""PTX that multiplies a slot, and the sums of its warps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.persistent_kernel.assembly import Assembly, float_literal, lines_of, registers
from benchmarks.persistent_kernel.layout import (
    BLOCK,
    CONSUMERS_BARRIER,
    DIGIT,
    GROUPS,
    MAGIC,
    ROW_BYTES,
    THREADS,
    WARP_OUTPUTS,
    Phase,
)


def multiply(phase: Phase) -> Assembly:
    """Adds a slot's products to the sums, two for each tile.

    `{0}`: words; `{1}`: parameters; `{2}`: digits of x; `{3}`: their steps. A lane has the sums of
    two channels with one digit of x, over one of the groups of each block, and over one half of the
    lanes of words.
    """
    rows = phase.outputs
    # quad, part: the lane's row of the operands in registers, and its place in a row. Its column of
    # x's operand has the same number as its row.
    parts = [
        """
        .reg .b32 lane, warp, quad, part, place, row, words, parameters, digits, steps, mask;
        .reg .pred is_odd, is_second, is_low;
        .reg .b32 x<8>, w<8>, a<4>, u, ones, d<4>, m;
        .reg .f32 scale, offset, total, step, unit;
        .reg .b16 low, high;
        mov.b32 ones, 0x01010101;""",
        f"mov.b32 m, {float_literal(MAGIC)};",
        """
        mov.u32 lane, %laneid;
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        shr.u32 quad, lane, 2;
        and.b32 part, lane, 3;
        and.b32 row, warp, 1;
        mad.lo.u32 row, row, 16, quad;
        bfe.u32 place, warp, 1, 1;
        add.u32 place, place, quad;
        and.b32 place, place, 1;
        mad.lo.u32 place, place, 4, part;
        shl.b32 place, place, 4;
        mad.lo.u32 words, row, 128, {0};
        add.u32 words, words, place;
        add.u32 place, place, {2};
        bfe.u32 u, quad, 1, 1;
        mad.lo.u32 digits, u, 256, place;
        setp.ge.u32 is_second, quad, 4;
        selp.b32 mask, 0xFF00FF00, 0x00FF00FF, is_second;
        shr.u32 place, part, 1;
        mad.lo.u32 steps, place, 4, {3};""",
        f"""
        mad.lo.u32 row, place, {rows}, row;
        mad.lo.u32 parameters, row, 4, {{1}};
        and.b32 place, part, 1;
        setp.ne.u32 is_low, place, 0;
        selp.f32 unit, 0f3F800000, {float_literal(DIGIT)}, is_low;
        and.b32 place, quad, 1;
        setp.ne.u32 is_odd, place, 0;""",
    ]
    for block in range(phase.blocks):
        for odd in range(2):
            to = registers("x", range(4 * odd, 4 * odd + 4))
            parts.append(f"ld.shared.v4.b32 {to}, [digits + {2 * BLOCK * block + 128 * odd}];")
        parts += [f"and.b32 x{i}, x{i}, mask;" for i in range(8)]
        parts += [f"ld.shared.f32 step, [steps + {4 * GROUPS * block}];"]
        parts += ["mul.f32 step, step, unit;"]
        parts += [_mma(["ones"] * 4, word) for word in range(4)]
        parts += ["selp.b32 u, d1, d0, is_odd;", "mov.b32 total, u;"]
        parts += [f"sub.f32 total, total, {float_literal(MAGIC)};"]
        for tile in range(phase.tiles):
            first = ROW_BYTES * (rows * block + WARP_OUTPUTS * tile)
            for lower in range(2):
                to = registers("w", range(4 * lower, 4 * lower + 4))
                parts.append(f"ld.shared.v4.b32 {to}, [words + {first + 8 * ROW_BYTES * lower}];")
            for word in range(4):
                for lower in range(2):
                    source = f"w{4 * lower + word}"
                    parts.append(f"and.b32 a{lower}, {source}, 0x0F0F0F0F;")
                    parts.append(f"shr.u32 u, {source}, 4;")
                    parts.append(f"and.b32 a{2 + lower}, u, 0x0F0F0F0F;")
                parts.append(_mma([f"a{number}" for number in range(4)], word))
            for lower in range(2):
                place = 4 * (rows * GROUPS * block + WARP_OUTPUTS * tile + 8 * lower)
                parts.append(_scale(f"{{s{2 * tile + lower}}}", lower, place))
    return Assembly(lines_of(parts))


def _mma(left: Sequence[str], word: int) -> str:
    """Multiplies operands with x of two lanes of words; the first product begins with MAGIC."""
    sums = registers("d", range(4))
    old = "{{m, m, m, m}}" if word == 0 else sums
    operand = "{{" + ", ".join(left) + "}}"
    return (
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        f"{sums}, {operand}, {{{{x{word}, x{4 + word}}}}}, {old};"
    )


def _scale(sums: str, lower: int, place: int) -> str:
    """Adds scale · step · (sum − zero · total of x) of a channel's group to its sums."""
    # The zero point below 2**16 becomes a float as the last bits of 2**23.
    return f"""
        ld.shared.b32 u, [parameters + {place}];
        mov.b32 {{{{low, high}}}}, u;
        cvt.f32.f16 scale, low;
        mul.f32 scale, scale, step;
        prmt.b32 u, u, 0x4B00, 0x5432;
        mov.b32 offset, u;
        sub.f32 offset, {float_literal(2.0**23)}, offset;
        selp.b32 u, d{2 * lower + 1}, d{2 * lower}, is_odd;
        fma.rn.f32 offset, offset, total, u;
        sub.f32 offset, offset, {float_literal(MAGIC)};
        fma.rn.f32 {sums}, scale, offset, {sums};"""


def store_sums(phase: Phase) -> Assembly:
    """Writes the sums to `{0}` [consumers, tiles, warps, 16]. Then consumers meet."""
    stores = []
    for tile in range(phase.tiles):
        for lower in range(2):
            stores.append(f"mov.f32 value, {{s{2 * tile + lower}}};")
            for lanes in (1, 2):
                stores.append(f"shfl.sync.bfly.b32 other, value, {lanes}, 31, 0xffffffff;")
                stores.append("add.f32 value, value, other;")
            stores.append(f"@first st.shared.f32 [place + {256 * tile + 32 * lower}], value;")
    return Assembly(f"""
        .reg .b32 thread, part, place;
        .reg .f32 value, other;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        and.b32 part, thread, 3;
        setp.eq.u32 first, part, 0;
        shr.u32 part, thread, 7;
        mad.lo.u32 place, part, {256 * phase.tiles}, {{0}};
        bfe.u32 part, thread, 5, 2;
        mad.lo.u32 place, part, 64, place;
        bfe.u32 part, thread, 2, 3;
        mad.lo.u32 place, part, 4, place;
        {lines_of(stores)}
        bar.sync {CONSUMERS_BARRIER}, {THREADS};""")


PLACE = """
        shr.u32 place, thread, 5;
        mad.lo.u32 place, place, 256, {0};
        and.b32 lane, thread, 31;
        mad.lo.u32 place, lane, 4, place;"""  # of a channel, the number of a thread, in the sums


def add_sums(phase: Phase, to: str, consumers: Iterable[int]) -> str:
    """Adds what warps have written of the channel at `place`."""
    places = [256 * phase.tiles * each + 128 * half for each in consumers for half in range(2)]
    loads = [
        f"ld.shared.f32 value, [place + {place}];\nadd.f32 {to}, {to}, value;" for place in places
    ]
    return lines_of([f"mov.f32 {to}, 0f00000000;", *loads])
