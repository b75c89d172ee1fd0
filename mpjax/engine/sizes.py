"""The fixed sizes of an engine, and the sizes to which its programs are padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpjax.constraints.automaton import SMALL_STATES
from mpjax.generation.buckets import ladder

LEAST_TOKENS = 16  # readings of fewer tokens take as long
SCORED_TOKENS = 256  # of a program that scores prompts, unless chunks are small or very large
MOST_STOP_IDS = 16  # of a request
LEAST_COLUMNS = 4  # entries of the narrowest block tables that a program reads


def small_chunk(chunk: int) -> int:
    """The most tokens of prompts in a small program, which takes as long as a step of decoding."""
    return max(chunk // 16, min(LEAST_TOKENS, chunk))


def middle_chunk(chunk: int) -> int:
    """The most tokens of prompts in a program of middle size."""
    return max(chunk // 4, min(LEAST_TOKENS, chunk))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The fixed sizes of an engine.

    slots: rows that may run at once. pages: of each group of layers, with the one that is nowhere.
    windows: of each group, None where all earlier tokens are read. page_size: tokens of a page.
    block: of the KV format, or None.
    chunk: the most tokens of prompts in a program. sequences: the most prompts in a program.
    max_gap: the seconds that rows which decode may wait for prompts, inf until all that have a
        place are read; None for `usual_gap`.
    steps: decoding steps of a program. proposed: the most tokens that are proposed to a row in a
    step, 0 without speculation.
    fine: whether programs have a size for any amount of work, not only for much of it. A GPU reads
        its weights in about the same time for few rows as for many; on a CPU the time of a program
        grows with its rows, its tokens and the room of its sequences.
    width: the most tokens of a piece of a prompt, to which programs pad each piece: on a CPU, where
        attention of varlen tokens is slow. None for varlen pieces.
    single: whether programs have one size each, since few of them run, and each has to be compiled.
    stop_ids: the most stop ids of a row.
    scores: whether requests may have their prompts scored.
    snapshots: places for copies of what recurrent layers keep for a row, behind those of slots.
    table_states: the most states of a constraint's own table on the device; 0 for none.
    """

    slots: int
    pages: tuple[int, ...]
    page_size: int
    windows: tuple[int | None, ...] = (None,)
    block: int | None = None
    chunk: int = 4096
    max_gap: float | None = None
    sequences: int = 32
    steps: int = 8
    proposed: int = 0
    fine: bool = False
    width: int | None = None
    single: bool = False
    stop_ids: int = MOST_STOP_IDS
    scores: bool = True
    snapshots: int = 0
    table_states: int = SMALL_STATES

    def most_drawn(self, steps: int) -> int:
        """The most tokens that so many decoding steps draw of a row: at most a page of them."""
        return min(steps * (1 + self.proposed), self.page_size) if self.proposed else steps

    def least_drawn(self, steps: int) -> int:
        """The fewest tokens that so many decoding steps draw of a row which goes on."""
        return 1 if self.proposed else steps

    def reading_sizes(self, *, greedy: bool, scored: bool) -> list[int]:
        """The tokens of prompts to which programs that read are padded, ascending.

        greedy: whether all tokens that are drawn are the likeliest ones. scored: whether prompts
        are scored.
        """
        small, middle = small_chunk(self.chunk), middle_chunk(self.chunk)
        if self.single:
            return [self.chunk]
        if scored:
            return [self.scored]
        if self.fine:
            return ladder(min(LEAST_TOKENS, self.chunk), self.chunk)
        return sorted({middle, self.chunk} | ({small} if greedy else set()))

    def row_sizes(self, rows: int, usual: Iterable[int]) -> list[int]:
        """The numbers to which up to `rows` rows are padded, ascending; `usual`: unless fine."""
        if self.single:
            return [rows]
        return ladder(1, rows) if self.fine else sorted(usual)

    def column_sizes(self, entries: int) -> list[int]:
        """The entries of block tables that programs read, ascending; `entries`: that there are."""
        is_fine = self.fine and not self.single
        return ladder(min(LEAST_COLUMNS, entries), entries) if is_fine else [entries]

    def piece_sizes(self) -> list[int]:
        """The numbers of pieces to which pieces are padded, ascending."""
        is_fine = self.fine and not self.single
        return sorted({1, self.sequences}) if is_fine else [self.sequences]

    @property
    def scored(self) -> int:
        """The most tokens of prompts in a program that scores them, since logits take memory."""
        if self.single:
            return self.chunk
        return max(small_chunk(self.chunk), min(middle_chunk(self.chunk), SCORED_TOKENS))

    @property
    def unit(self) -> int:
        """Tokens of the smallest prefix that can be shared: whole pages and whole blocks."""
        return max(self.page_size, self.block or 1)

    def tokens(self, max_tokens: int) -> int:
        """The tokens in the cache, of all rows together; `max_tokens`: the most of a row."""
        pages = max((count - 1 for count in self.pages), default=0)
        return pages * self.page_size if self.pages else self.slots * max_tokens

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)
