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
KEPT = 32  # programs whose seconds are remembered
LEAST_SECONDS = 1e-6  # of a program, by which others are divided
NEWEST = 3  # of one size, whose median counts: one that something held up changes nothing


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
    of its tokens. The rate is that of the newest programs of the size; for a size without any, the
    least rate of other sizes.
    """

    def __init__(self) -> None:
        self._rates: collections.deque[tuple[int, float]] = collections.deque(maxlen=KEPT)
        self._steps: collections.deque[float] = collections.deque(maxlen=NEWEST)

    def learn_reading(self, size: int, work: float, seconds: float) -> None:
        """Adds a program that has read. size: its tokens, with padding. work: of their context."""
        self._rates.append((size, max(seconds, LEAST_SECONDS) / (size + work)))

    def learn_step(self, seconds: float) -> None:
        """Adds the seconds of a decoding step."""
        self._steps.append(seconds)

    @property
    def step_seconds(self) -> float:
        """The seconds of a decoding step; 0 before any was measured."""
        return statistics.median(self._steps) if self._steps else 0.0

    def rate(self, size: int) -> float:
        """Seconds per token at the first position. A program has to have been measured."""
        by_size: dict[int, list[float]] = {}
        for measured, rate in self._rates:
            by_size.setdefault(measured, []).append(rate)
        medians = {each: statistics.median(rates[-NEWEST:]) for each, rates in by_size.items()}
        return medians[size] if size in medians else min(medians.values())

    def seconds(self, size: int, work: float) -> float:
        """The seconds of a program that reads; inf before any was measured."""
        return self.rate(size) * (size + work) if self._rates else math.inf

    def choose(self, sizes: Sequence[int], start: int, gap: float) -> tuple[int, float]:
        """The size of the program that reads next, and the most context work of its tokens.

        sizes: that there are, ascending. start: the position of the first token to read.
        gap: seconds until the next token of rows that decode, which take a step behind the program.

        Of the sizes whose seconds are within the gap, it is the one that reads the most tokens per
        second, steps between included. Where none is, it is the smallest, with little context;
        and before anything was measured, the second one.
        """
        if gap == math.inf:
            return sizes[-1], math.inf
        if not self._rates:  # so that it is a middle one
            size = sizes[min(1, len(sizes) - 1)]
            return size, size
        budget = gap - self.step_seconds
        best, choice = 0.0, (sizes[0], sizes[0] / 4)
        for size in sizes:
            rate = self.rate(size)
            work = budget / rate - size
            tokens = min(size, tokens_within(start, work))
            seconds = rate * (size + context_work(start, tokens)) + self.step_seconds
            if work > 0 and tokens and tokens / seconds > best:
                best, choice = tokens / seconds, (size, work)
        return choice
