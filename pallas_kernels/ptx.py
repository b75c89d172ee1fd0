"""PTX for a table of pairs of values in shared memory."""

from __future__ import annotations

PAIR_BYTES = 128 * 16**2 + 1024  # bytes of shared memory that `share_pairs` declares


def share_pairs(halves: int) -> str:
    """PTX that fills shared memory with all pairs of a table's values, and sets $0 to its address.

    halves: the number of operands $1, $2, …; each has two of the table's sixteen 16-bit values.

    Word i + 16 · j has entry i in its lower half and entry j in its upper half. Each of a warp's
    32 lanes has its own copy of all words, in its own bank, so that a warp looks up any 32 words
    without bank conflicts: the copy of lane l is at address + 128 · word + 4 · l.
    """
    words = "".join(f" st.shared.b32 [table+{4 * i}], ${i + 1};" for i in range(halves))
    # A thread writes the 32 copies of a word in eight stores of 16 bytes, beginning with the copy
    # at 16 · lane modulo 128, so that lanes write to different banks.
    copies = "".join(
        f"""
        add.u32 place, lane, {16 * eighth};
        and.b32 place, place, 127;
        add.u32 place, place, row;
        st.shared.v4.b32 [place], {{low, low, low, low}};"""
        for eighth in range(8)
    )
    # `wgmma` requires tiles aligned to 1024 bytes. A multiple of that keeps Triton's tiles so.
    return f"""{{
        .shared .align 1024 .b8 pairs[{PAIR_BYTES - 1024}];
        .shared .align 1024 .b8 values[1024];
        .reg .b32 table, lane, pair, threads, row, place, low, high;
        .reg .pred done;
        mov.u32 table, values;{words}
        bar.sync 0;
        mov.u32 lane, %laneid;
        shl.b32 lane, lane, 4;
        mov.u32 pair, %tid.x;
        mov.u32 threads, %ntid.x;
    next:
        setp.ge.u32 done, pair, 256;
        @done bra end;
        and.b32 place, pair, 15;
        mad.lo.u32 place, place, 2, table;
        ld.shared.u16 low, [place];
        shr.u32 place, pair, 4;
        and.b32 place, place, 15;
        mad.lo.u32 place, place, 2, table;
        ld.shared.u16 high, [place];
        prmt.b32 low, low, high, 0x5410;
        mov.u32 row, pairs;
        mad.lo.u32 row, pair, 128, row;{copies}
        add.u32 pair, pair, threads;
        bra next;
    end:
        bar.sync 0;
        mov.u32 $0, pairs;
    }}"""
