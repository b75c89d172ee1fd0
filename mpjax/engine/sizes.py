"""The fixed sizes of an engine, and the sizes to which its programs are padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpjax.constraints.automaton import SMALL_STATES
from mpjax.generation.buckets import ladder

LEAST_TOKENS = 16  # a prefill of fewer tokens takes as long
SCORED_TOKENS = 256  # of a program that scores prompts, unless chunks are small or very large
MOST_STOP_IDS = 16  # stop ids of a request
LEAST_COLUMNS = 4  # width of the narrowest block tables


def small_chunk(chunk: int) -> int:
    """The tokens of a small prefill program, which takes about as long as a decoding step."""
    return max(chunk // 16, min(LEAST_TOKENS, chunk))


def middle_chunk(chunk: int) -> int:
    """The tokens of a prefill program of middle size."""
    return max(chunk // 4, min(LEAST_TOKENS, chunk))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The fixed sizes of an engine.

    slots: the most running rows. pages: number of pages of each group of layers, including NOWHERE.
    windows: sliding window of each group in tokens, None for full attention. page_size: tokens of a
    page. block: tokens of a block of the KV format, or None.
    chunk: the largest prefill chunk, in tokens. sequences: the most prompts in a prefill program.
    max_gap: the seconds that decoding rows may wait for prefill; with inf until all prompts with a
        slot are prefilled; None for `usual_gap`.
    steps: decoding steps of a program. proposed: the most proposed tokens of a row in a step; 0
    without speculation.
    fine: whether programs are compiled for many sizes, small ones too. On a GPU few rows take about
        as long as many, since reading the weights dominates; on a CPU the time grows with rows,
        tokens and the length of block tables.
    width: the most tokens of a piece, to which prefill programs pad each piece: used on a CPU,
        where varlen attention is slow. None for varlen pieces.
    single: whether each program is compiled for one size only, for engines that run few programs.
    stop_ids: the most stop ids of a row.
    scores: whether requests may ask for log-probabilities of their prompts.
    snapshots: places for copies of a row's recurrent states, after the places of slots.
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
        """The most tokens of a row in `steps` decoding steps; with speculation at most a page."""
        return min(steps * (1 + self.proposed), self.page_size) if self.proposed else steps

    def least_drawn(self, steps: int) -> int:
        """The fewest tokens of a row in `steps` decoding steps, unless it ends."""
        return 1 if self.proposed else steps

    def reading_sizes(self, *, greedy: bool, scored: bool) -> list[int]:
        """The compiled prefill sizes in tokens, ascending.

        greedy: whether all rows are greedy. scored: whether prompts are scored.
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
        """The compiled batch sizes up to `rows`, ascending.

        usual: the sizes of an engine whose sizes are not `fine`.
        """
        if self.single:
            return [rows]
        return ladder(1, rows) if self.fine else sorted(usual)

    def column_sizes(self, entries: int) -> list[int]:
        """The compiled widths of block tables, ascending. entries: the full width."""
        is_fine = self.fine and not self.single
        return ladder(min(LEAST_COLUMNS, entries), entries) if is_fine else [entries]

    def piece_sizes(self) -> list[int]:
        """The compiled numbers of pieces of prefill programs, ascending."""
        is_fine = self.fine and not self.single
        return sorted({1, self.sequences}) if is_fine else [self.sequences]

    @property
    def scored(self) -> int:
        """The most tokens of a program that scores prompts, limited by the memory of logits."""
        if self.single:
            return self.chunk
        return max(small_chunk(self.chunk), min(middle_chunk(self.chunk), SCORED_TOKENS))

    @property
    def unit(self) -> int:
        """Tokens of the smallest prefix that can be shared: whole pages and whole blocks."""
        return max(self.page_size, self.block or 1)

    def tokens(self, max_tokens: int) -> int:
        """The number of tokens that the cache holds. max_tokens: the most tokens of a row."""
        pages = max((count - 1 for count in self.pages), default=0)
        return pages * self.page_size if self.pages else self.slots * max_tokens

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)
