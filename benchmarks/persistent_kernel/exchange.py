"""PTX that finishes a product: programs write their channels, count, and wait for all others."""

from __future__ import annotations

from benchmarks.persistent_kernel.assembly import Assembly, float_literal, lines_of
from benchmarks.persistent_kernel.layout import (
    CONSUMERS,
    CONSUMERS_BARRIER,
    COUNTERS,
    DOWN,
    GATE_UP,
    INNER_WRITTEN,
    OUTPUT,
    OUTPUT_WRITTEN,
    POLLS,
    PROGRAMS,
    PROGRAMS_DONE,
    THREADS,
    WAITS_GIVEN_UP,
)
from benchmarks.persistent_kernel.products import PLACE, add_sums


def _signal(counter: str, number: int) -> str:
    """Counts a warp whose lanes have written."""
    return f"""
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first fence.acq_rel.gpu;
        @first red.relaxed.gpu.global.add.u32 [{counter} + {4 * number}], 1;"""


def _sleep(lag: int) -> str:
    """Sleeps `lag` nanoseconds times a number below 8, that of the program."""
    if not lag:
        return ""
    return f"""
        mov.u32 lane, %ctaid.x;
        mul.lo.u32 lane, lane, 5;
        and.b32 lane, lane, 7;
        mul.lo.u32 lane, lane, {lag};
        nanosleep.u32 lane;"""


def finish_output(lag: int) -> Assembly:
    """Writes a program's channels of the stream, and the sum of their squares.

    `{0}`: sums; `{1}`: residual; `{2}`: stream; `{3}`: of the program in the squares; `{4}`:
    counters. The first warp does it.
    """
    butterfly = lines_of(
        f"shfl.sync.bfly.b32 other, square, {lanes}, 31, 0xffffffff;\n"
        "add.f32 square, square, other;"
        for lanes in (16, 8, 4, 2, 1)
    )
    return Assembly(f"""
        .reg .b32 thread, place, lane;
        .reg .b64 at, offset;
        .reg .b16 half;
        .reg .f32 value, total, old, square, other;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, 32;
        @first bra end;{_sleep(lag)}
        {PLACE}
        {add_sums(OUTPUT, "total", range(CONSUMERS))}
        mul.wide.u32 offset, thread, 2;
        add.u64 at, {{1}}, offset;
        ld.global.b16 half, [at];
        cvt.f32.bf16 old, half;
        add.f32 total, total, old;
        cvt.rn.bf16.f32 half, total;
        add.u64 at, {{2}}, offset;
        st.global.b16 [at], half;
        cvt.f32.bf16 total, half;
        mul.f32 square, total, total;
        {butterfly}
        setp.eq.u32 first, thread, 0;
        @first st.global.f32 [{{3}}], square;
        {_signal("{4}", OUTPUT_WRITTEN)}
    end:""")


def finish_inner(lag: int) -> Assembly:
    """Writes silu(gate) · up of a program's channels; `{0}`: sums; `{1}`: inner; `{2}`: counters.

    A thread has a channel.
    """
    return Assembly(f"""
        .reg .b32 thread, place, lane;
        .reg .b64 at, offset;
        .reg .b16 half;
        .reg .f32 value, gate, up, power;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, {GATE_UP.outputs};
        @first bra end;{_sleep(lag)}
        {PLACE}
        {add_sums(GATE_UP, "gate", range(0, CONSUMERS, 2))}
        {add_sums(GATE_UP, "up", range(1, CONSUMERS, 2))}
        mul.f32 power, gate, {float_literal(-1.4426950408889634)};
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 power, power;
        mul.f32 gate, gate, power;
        mul.f32 gate, gate, up;
        cvt.rn.bf16.f32 half, gate;
        mul.wide.u32 offset, thread, 2;
        add.u64 at, {{1}}, offset;
        st.global.b16 [at], half;
        {_signal("{2}", INNER_WRITTEN)}
    end:""")


def finish_down() -> Assembly:
    """Writes a program's channels of the result. The last program makes counters zeros.

    `{0}`: sums; `{1}`: out; `{2}`: counters; `{3}`: the number of waits that gave up.
    """
    zeros = lines_of(f"st.global.u32 [{{2}} + {4 * number}], 0;" for number in range(COUNTERS))
    return Assembly(f"""
        .reg .b32 thread, place, lane, count;
        .reg .b64 at, offset;
        .reg .f32 value, total;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, 32;
        @first bra end;
        {PLACE}
        {add_sums(DOWN, "total", range(CONSUMERS))}
        mul.wide.u32 offset, thread, 4;
        add.u64 at, {{1}}, offset;
        st.global.f32 [at], total;
        setp.ne.u32 first, thread, 0;
        @first bra end;
        atom.acq_rel.gpu.global.add.u32 count, [{{2}} + {4 * PROGRAMS_DONE}], 1;
        setp.ne.u32 first, count, {PROGRAMS - 1};
        @first bra end;
        ld.relaxed.gpu.global.u32 count, [{{2}} + {4 * WAITS_GIVEN_UP}];
        st.global.u32 [{{3}}], count;
        {zeros}
    end:""")


def wait_for_all(number: int, count: int) -> Assembly:
    """Waits until a counter of `{0}` has reached `count`, for all consumers of a program."""
    return Assembly(f"""
        .reg .b32 thread, found, polls;
        .reg .pred done;
        mov.u32 thread, %tid.x;
        setp.ne.u32 done, thread, 0;
        @done bra end;
        mov.u32 polls, 0;
    again:
        ld.relaxed.gpu.global.u32 found, [{{0}} + {4 * number}];
        setp.ge.u32 done, found, {count};
        @done bra end;
        add.u32 polls, polls, 1;
        setp.lt.u32 done, polls, {POLLS};
        @done bra again;
        red.global.add.u32 [{{0}} + {4 * WAITS_GIVEN_UP}], 1;
    end:
        fence.acq_rel.gpu;
        bar.sync {CONSUMERS_BARRIER}, {THREADS};""")
