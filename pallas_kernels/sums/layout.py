"""The layout of a device's inbox, into which the other devices of a sum write, and tile sizes."""

from __future__ import annotations

import dataclasses

MOST_DEVICES = 8  # of one host
MOST_BYTES = 1 << 20  # of a sum by the kernel, whose threads hold all their units in registers
MOST_PROGRAMS = 128  # of a device; all run at once, since each waits for those of other devices
WARPGROUPS = 2  # of a program
UNIT = 16  # bytes of x that a thread loads at once
# Bytes of the header: an address for each device, this device's number, a counter for each program.
RANK, COUNTERS, HEADER = 8 * MOST_DEVICES, 128, 128 + 4 * MOST_PROGRAMS + 384


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the threads of a kernel divide sums of `nbytes` bytes, a multiple of UNIT.

    terms: of each device's x, which is as many times as long. warpgroups: of each program.
    """

    devices: int
    nbytes: int
    terms: int = 1
    warpgroups: int = WARPGROUPS

    @property
    def threads(self) -> int:
        """The number of threads of a program."""
        return 128 * self.warpgroups

    @property
    def units(self) -> int:
        """The number of units of a thread."""
        return max(-(-self.nbytes // (UNIT * self.threads * MOST_PROGRAMS)), 1)

    @property
    def programs(self) -> int:
        """The number of programs of a device."""
        return -(-self.nbytes // (UNIT * self.threads * self.units))

    @property
    def part_bytes(self) -> int:
        """The bytes of an inbox that one device writes in a round: each word with its flag."""
        return 2 * UNIT * self.threads * self.units * self.programs


def inbox_words(devices: int, nbytes: int) -> int:
    """The 32-bit words of an inbox for sums of at most `nbytes` bytes.

    It has room for two rounds. A device writes a round's part only after all others have sent
    theirs of the round before, hence after they have read the parts of the round before that.
    """
    return (HEADER + 2 * devices * Tiles(devices, nbytes).part_bytes) // 4
