"""PTX of a program's barriers and copies, and of its clock."""

from __future__ import annotations

from benchmarks.persistent_kernel.assembly import Assembly
from benchmarks.persistent_kernel.layout import (
    GROUPS,
    POLLS,
    PROGRAM_BARRIER,
    ROW_BYTES,
    SLOTS,
    THREADS,
    WAITS_GIVEN_UP,
    Phase,
)


def initialise() -> Assembly:
    """Sets up the barriers `{0}` (full) and `{1}` (free), for all warpgroups."""
    return Assembly(f"""
        .reg .b32 thread, place;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.lt.u32 first, thread, {SLOTS};
        mad.lo.u32 place, thread, 8, {{0}};
        @first mbarrier.init.shared::cta.b64 [place], 1;
        mad.lo.u32 place, thread, 8, {{1}};
        @first mbarrier.init.shared::cta.b64 [place], 4;
        fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta;
        bar.sync {PROGRAM_BARRIER}, {THREADS + 128};""")


def wait(*, warp: bool) -> Assembly:
    """Waits for the phase of barrier `{0}` with the parity of `{2}`, if `{3}`; `{1}`: counters.

    warp: whether only the warpgroup's first warp waits.
    """
    skip = (
        """
        mov.u32 polls, %tid.x;
        and.b32 polls, polls, 127;
        setp.ge.u32 done, polls, 32;
        @done bra end;"""
        if warp
        else ""
    )
    return Assembly(f"""
        .reg .b32 polls, parity;
        .reg .pred done;{skip}
        setp.eq.u32 done, {{3}}, 0;
        @done bra end;
        and.b32 parity, {{2}}, 1;
        mov.u32 polls, 0;
    again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [{{0}}], parity, 1000;
        @done bra end;
        add.u32 polls, polls, 1;
        setp.lt.u32 done, polls, {POLLS};
        @done bra again;
        red.global.add.u32 [{{1}} + {4 * WAITS_GIVEN_UP}], 1;
    end:""")


def arrive() -> Assembly:
    """Arrives at barrier `{0}`, once for each warp."""
    return Assembly("""
        .reg .b32 lane;
        .reg .b64 state;
        .reg .pred first;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first mbarrier.arrive.shared::cta.b64 state, [{0}];""")


def copy_slot(phase: Phase, outputs: int, *, copies: bool) -> Assembly:
    """Begins the copies of a slot, whose barrier `{4}` ends a phase when all have arrived.

    `{0}`, `{1}`: the first row of words, and the first parameter, in a matrix of so many output
    channels; `{2}`, `{3}`: the slot's words and parameters. Each of some threads begins a copy.

    copies: whether there are any.
    """
    rows = phase.outputs
    nbytes = (ROW_BYTES + 4 * GROUPS) * rows * phase.blocks
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    begin = f"@!is_other {copy} [to], [from], nbytes, [{{4}}];" if copies else ""
    return Assembly(f"""
        .reg .b32 thread, to, place, nbytes;
        .reg .b64 from, other, state;
        .reg .pred is_other, is_first, is_words;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 is_first, thread, 0;
        @is_first mbarrier.arrive.expect_tx.shared::cta.b64 state, [{{4}}], {nbytes * copies};
        bar.warp.sync 0xffffffff;
        setp.ge.u32 is_other, thread, {(1 + GROUPS) * phase.blocks};
        setp.lt.u32 is_words, thread, {phase.blocks};
        mad.lo.u32 to, thread, {ROW_BYTES * rows}, {{2}};
        mad.wide.u32 from, thread, {ROW_BYTES * outputs}, {{0}};
        sub.u32 thread, thread, {phase.blocks};
        mad.lo.u32 place, thread, {4 * rows}, {{3}};
        mad.wide.u32 other, thread, {4 * outputs}, {{1}};
        selp.b32 to, to, place, is_words;
        selp.b64 from, from, other, is_words;
        selp.b32 nbytes, {ROW_BYTES * rows}, {4 * rows}, is_words;
        {begin}""")


def mark_time() -> Assembly:
    """Writes the clock to `{0}`, by the first consumer and by the producer."""
    return Assembly("""
        .reg .b32 thread, now;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 511;
        setp.eq.u32 first, thread, 0;
        mov.u32 now, %clock;
        @first st.global.u32 [{0}], now;""")
