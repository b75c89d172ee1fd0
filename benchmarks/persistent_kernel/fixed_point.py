"""PTX that rounds x, or the norm of the stream, to two digits of 7 bits."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.persistent_kernel.assembly import Assembly, float_literal, lines_of, registers
from benchmarks.persistent_kernel.layout import (
    BLOCK,
    CONSUMERS_BARRIER,
    DIGIT,
    GROUPS,
    HIDDEN,
    LARGEST,
    MAGIC,
    PLANES,
    THREADS,
)

_LOAD = "ld.relaxed.gpu.global.v4.b32"  # what other programs have written is in the L2 cache


def load_x(channels: int) -> Assembly:
    """Writes x `{0}` in fixed point to digits `{1}` and steps `{2}`, for all consumers."""
    loads = (f"{_LOAD} {registers('v', _plane(i))}, [at + {128 * i}];" for i in range(PLANES))
    return _fixed(channels, lines_of(loads), "")


def load_norm(epsilon: float) -> Assembly:
    """Writes the norm of stream `{0}` in fixed point to digits `{1}` and steps `{2}`.

    `{3}`: the squares; `{4}`: the norm's weight. For all consumers of a program.
    """
    loads = [
        f"""
        {_LOAD} {registers("v", _plane(i))}, [at + {128 * i}];
        ld.global.v4.b32 {registers("n", _plane(i))}, [weight + {128 * i}];"""
        for i in range(PLANES)
    ]
    scaled = [
        f"""
        shl.b32 low, v{i}, 16;
        and.b32 high, v{i}, 0xFFFF0000;
        mul.f32 low, low, total;
        mul.f32 high, high, total;
        shl.b32 other, n{i}, 16;
        mul.f32 low, low, other;
        and.b32 other, n{i}, 0xFFFF0000;
        mul.f32 high, high, other;
        cvt.rn.bf16x2.f32 v{i}, high, low;"""
        for i in range(4 * PLANES)
    ]
    mean = f"""
        mov.u32 other, %laneid;
        mad.wide.u32 weight, other, 16, {{3}};
        ld.relaxed.gpu.global.v4.f32 {registers("f", range(4))}, [weight];
        add.f32 total, f0, f1;
        add.f32 f2, f2, f3;
        add.f32 total, total, f2;
        {_over_lanes("add", "total", (16, 8, 4, 2, 1))}
        fma.rn.f32 total, total, {float_literal(1 / HIDDEN)}, {float_literal(epsilon)};
        rsqrt.approx.ftz.f32 total, total;
        add.u64 weight, offset, {{4}};"""
    return _fixed(HIDDEN, mean + lines_of(loads), lines_of(scaled))


def _plane(number: int) -> range:
    """Registers with x of a plane, of 8 lanes of words."""
    return range(4 * number, 4 * number + 4)


def _over_lanes(operation: str, value: str, lanes: Iterable[int]) -> str:
    """Joins a float of lanes whose numbers differ by some bits."""
    return lines_of(
        f"shfl.sync.bfly.b32 other, {value}, {each}, 31, 0xffffffff;\n"
        f"{operation}.f32 {value}, {value}, other;"
        for each in lanes
    )


def _fixed(channels: int, load: str, change: str) -> Assembly:
    """Writes bfloat16 values to digits `{1}` and steps `{2}`. A thread has 8 lanes of words.

    load: PTX that loads pairs of values to v0 … v15, from `at` on, `offset` behind `{0}`.
    change: PTX that changes them.
    """
    wide = []
    for i in range(4 * PLANES):
        wide.append(f"shl.b32 q{2 * i}, v{i}, 16;")
        wide.append(f"and.b32 q{2 * i + 1}, v{i}, 0xFFFF0000;")
    scale = []
    for group in range(GROUPS):
        scale.append(f"mov.f32 most, {float_literal(1e-30)};")
        own = range(16 * group, 16 * group + 16)
        for i in own:
            scale += [f"abs.f32 other, q{i};", "max.f32 most, most, other;"]
        scale.append(_over_lanes("max", "most", (1, 2, 4)))
        scale.append(f"mul.f32 step{group}, most, {float_literal(1 / LARGEST)};")
        scale.append(f"rcp.approx.f32 most, step{group};")
        scale += [f"fma.rn.f32 q{i}, q{i}, most, {float_literal(MAGIC)};" for i in own]
    stores = []
    for digit in range(2):
        if digit == 0:
            stores += [f"shr.u32 h{i}, q{i}, 7;" for i in range(32)]
        else:
            stores += [f"and.b32 h{i}, q{i}, {DIGIT - 1};" for i in range(32)]
        for odd in range(2):
            for word in range(4):
                for i in range(2):  # lanes of a word
                    first, second = (8 * (odd + plane) + 2 * word + i for plane in (0, 2))
                    stores.append(f"prmt.b32 v{i}, h{first}, h{second}, 0x0040;")
                stores.append(f"prmt.b32 n{word}, v0, v1, 0x5410;")
            place = 256 * digit + 128 * odd
            stores.append(f"st.shared.v4.b32 [to + {place}], {registers('n', range(4))};")
    return Assembly(f"""
        .reg .b32 thread, lanes, to, place, v<16>, n<16>, q<32>, h<32>, low, high, other;
        .reg .f32 total, f<4>, most, step<2>;
        .reg .b64 at, offset, weight;
        .reg .pred is_other, is_first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 is_other, thread, {channels // 32};
        @is_other bra end;
        shr.u32 place, thread, 3;
        and.b32 lanes, thread, 7;
        setp.eq.u32 is_first, lanes, 0;
        shl.b32 lanes, lanes, 4;
        mad.lo.u32 to, place, {2 * BLOCK}, lanes;
        cvt.u64.u32 offset, to;
        add.u64 at, offset, {{0}};
        add.u32 to, to, {{1}};
        mad.lo.u32 place, place, {4 * GROUPS}, {{2}};
        {load}
        {change}
        {lines_of(wide)}
        {lines_of(scale)}
        @is_first st.shared.v2.f32 [place], {{{{step0, step1}}}};
        {lines_of(stores)}
    end:
        bar.sync {CONSUMERS_BARRIER}, {THREADS};""")
