"""Decides how much of prompts a program may read while rows that decode wait.

Pure Python: whoever runs programs tells the seconds that they took.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence

USUAL_GAP = 0.05  # seconds
CROWD = 4  # at most so many times as long, where more rows wait for their first token than decode
# A token of a prompt costs twice as much at this position as at the first: it attends to more.
CONTEXT = 8192
LEAST_SECONDS = 1e-6  # of a program, by which others are divided
NEWEST = 3  # of one size, whose median counts: one that something held up changes nothing
# A larger program takes at most so many times as long per token as a smaller one. Where it was
# measured as slower, something held it up several times, and it is tried again.
SLOWER = 1.5


def context_work(start: int, count: int) -> float:
    """The cost of attention of `count` tokens from position `start` on, in tokens at the first."""
    return count * (start + count / 2) / CONTEXT


def tokens_within(start: int, work: float) -> int:
    """The most tokens from position `start` on whose `context_work` is no more than `work`."""
    if work == math.inf:
        return 2**31
    at = start / CONTEXT
    return int(CONTEXT * (math.sqrt(at**2 + 2 * max(work, 0) / CONTEXT) - at) + 1e-6)


def usual_gap(waiting: int, decoding: int) -> float:
    """The seconds that rows which decode may wait for prompts, where the user gives none.

    waiting, decoding: the number of rows that wait for a token behind their prompt, and of rows
        that decode.
    """
    return USUAL_GAP * min(max(1.0, waiting / max(decoding, 1)), CROWD)


class Pace:
    """The seconds that programs take, as far as they were measured.

    The seconds of a program that reads are predicted as a rate times its size and the context work
    of its tokens. The rate is that of the newest programs of the size. For a size without any, the
    seconds grow with the square root of the size from the next smaller one on: between those of
    reading the weights, which are constant, and those of products, which grow with it. Without a
    smaller one, the rate is that of the next larger one. So a size is taken for a little faster
    than it may be, and is measured when it is tried.
    """

    def __init__(self) -> None:
        self._rates: dict[int, collections.deque[float]] = {}  # of the newest, by size
        self._steps: collections.deque[float] = collections.deque(maxlen=NEWEST)

    def learn_reading(self, size: int, work: float, seconds: float) -> None:
        """Adds a program that has read. size: its tokens, with padding. work: of their context."""
        newest = self._rates.setdefault(size, collections.deque(maxlen=NEWEST))
        newest.append(max(seconds, LEAST_SECONDS) / (size + work))

    def learn_step(self, seconds: float) -> None:
        """Adds the seconds of a decoding step."""
        self._steps.append(seconds)

    @property
    def step_seconds(self) -> float:
        """The seconds of a decoding step; 0 before any was measured."""
        return statistics.median(self._steps) if self._steps else 0.0

    def rate(self, size: int) -> float:
        """Seconds per token at the first position. A program has to have been measured."""
        medians = {each: statistics.median(rates) for each, rates in self._rates.items()}
        smaller = [each for each in medians if each < size]
        if size in medians:
            return min([medians[size], *(SLOWER * medians[each] for each in smaller)])
        if smaller:
            return self.rate(max(smaller)) * math.sqrt(max(smaller) / size)
        return medians[min(medians)]

    def seconds(self, size: int, work: float) -> float:
        """The seconds of a program that reads; inf before any was measured."""
        return self.rate(size) * (size + work) if self._rates else math.inf

    def choose(
        self, sizes: Sequence[int], rows: Sequence[tuple[int, int]], gap: float
    ) -> tuple[int, float]:
        """The size of the program that reads next, and the most context work of its tokens.

        sizes: that there are, ascending. rows: for each row with tokens to read, in order, the
            position of the first one and their number.
        gap: seconds until the next token of rows that decode, which take a step behind the program;
            inf where none waits for that.

        Of the sizes whose seconds are within the gap, it is the one that reads the most tokens per
        second, steps between included; of equal ones the largest. The work of the context does not
        count there, since it is the same in programs of any size. Where none is within the gap, it
        is the smallest, with little context. Before anything was measured, seconds grow with the
        square root of the size, and if they have to be within a gap, it is the second one.
        """
        if not self._rates and gap < math.inf:
            size = sizes[min(1, len(sizes) - 1)]
            return size, size
        step = 0.0 if gap == math.inf else self.step_seconds
        best, choice = 0.0, (sizes[0], sizes[0] / 4)
        for size in sizes:
            rate = self.rate(size) if self._rates else 1 / math.sqrt(size)
            most = (gap - step) / rate - size
            tokens = _fitting_tokens(rows, size, most)
            speed = tokens / (rate * size + step)
            if most > 0 and tokens and speed >= best:
                best, choice = speed, (size, most)
        return choice


def _fitting_tokens(rows: Sequence[tuple[int, int]], size: int, work: float) -> int:
    """The tokens of rows that fit into a program.

    rows: positions of first tokens, and numbers of tokens. size: the most tokens. work: the most
    context work of theirs.
    """
    tokens = 0
    for start, count in rows:
        taken = min(count, size - tokens, tokens_within(start, work))
        tokens, work = tokens + taken, work - context_work(start, taken)
        if taken < count:
            break
    return tokens
