"""Shapes of the persistent kernel: how its programs divide products, and its names for counters."""

from __future__ import annotations

from typing import NamedTuple

HIDDEN, INTERMEDIATE = 4096, 12288
PROGRAMS = 128
CONSUMERS = 4  # warpgroups; even ones have the gate's channels, odd ones the up product's
THREADS = 128 * CONSUMERS  # of consumers
# Slots that are copied at a time. Memory needs about 25 kB for each program. With more, whatever a
# program writes or reads in global memory queues behind its copies.
IN_FLIGHT = 4
# Parts that a kernel can leave out, so that the rest is measured.
PARTS = "products", "copies", "counters"
SLOTS = 15  # of the ring: as many as fit
BLOCK = 256  # input channels of a row of words, which has a nibble of each of four planes
ROW_BYTES, PLANES, GROUPS = 128, 4, 2  # of a row of words
WARP_OUTPUTS = 32  # output channels of two pairs of warps; a pair shares 16, with half a row each
DIGIT = 128  # of x
LARGEST = 127 * DIGIT  # of a group's x in fixed point
MAGIC = 3 << 22  # as a float: an integer below 2**22, added to its bits, is added to the float
POLLS = 1 << 14  # of a wait, until it gives up; each takes about a microsecond

# Counters in global memory. They are zeros between launches.
OUTPUT_WRITTEN, INNER_WRITTEN, PROGRAMS_DONE, WAITS_GIVEN_UP = range(4)
COUNTERS = 4
CONSUMERS_BARRIER, PROGRAM_BARRIER = 14, 15  # named barriers that Mosaic does not use


# Where the clock is read: by the first consumer, and by the producer.
MARKS = (
    "begin",
    "x",
    "output",
    "output told",
    "output of all",
    "norm",
    "gate_up",
    "inner told",
    "inner of all",
    "inner",
    "down",
    "end",
    "copies begin",
    "output copied",
    "gate_up copied",
    "down copied",
)


class Phase(NamedTuple):
    """How a product is cut into slots.

    outputs: channels of a slot. blocks: of K in a slot. slots: of the product in a program.
    halves: 2 where slots with channels of a first and a second matrix take turns.
    """

    outputs: int
    blocks: int
    slots: int
    halves: int = 1

    @property
    def tiles(self) -> int:
        """The number of tiles of 16 output channels that a warp multiplies."""
        return self.outputs // WARP_OUTPUTS


OUTPUT = Phase(HIDDEN // PROGRAMS, 2, HIDDEN // BLOCK // 2)
GATE_UP = Phase(INTERMEDIATE // PROGRAMS, 1, 2 * HIDDEN // BLOCK, halves=2)
DOWN = Phase(HIDDEN // PROGRAMS, 3, INTERMEDIATE // BLOCK // 3)
PHASES = OUTPUT, GATE_UP, DOWN
SLOT_ROWS = max(phase.outputs * phase.blocks for phase in PHASES)  # of words in a slot
