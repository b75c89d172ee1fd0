"""Chooses the size of a prefill chunk so that decoding rows don't wait too long.

Pure Python; the caller reports the measured seconds of each program.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence

USUAL_GAP = 0.05  # seconds
CROWD = 4  # the largest factor of USUAL_GAP, if more rows wait for their first token than decode
# The position at which prefilling a token costs twice as much as at the first, by its attention.
CONTEXT = 8192
LEAST_SECONDS = 1e-6  # lower bound of a program's seconds, against division by 0
NEWEST = 3  # measurements per size, whose median ignores a delayed one
# Upper bound of a larger program's time per token over a smaller one's. A larger ratio comes from
# delayed measurements, and is capped so that the size is tried again.
SLOWER = 1.5


def context_work(start: int, count: int) -> float:
    """Attention's cost for `count` tokens from position `start` on, in tokens at position 0."""
    return count * (start + count / 2) / CONTEXT


def tokens_within(start: int, work: float) -> int:
    """The most tokens from position `start` on whose `context_work` is no more than `work`."""
    if work == math.inf:
        return 2**31
    at = start / CONTEXT
    return int(CONTEXT * (math.sqrt(at**2 + 2 * max(work, 0) / CONTEXT) - at) + 1e-6)


def usual_gap(waiting: int, decoding: int) -> float:
    """The default max_gap: the seconds that decoding rows may wait for prefill.

    waiting, decoding: the number of rows that wait for their first token, and of decoding rows.
    """
    return USUAL_GAP * min(max(1.0, waiting / max(decoding, 1)), CROWD)


class Pace:
    """Predicts the seconds of programs from measured ones.

    A prefill program takes rate × (size + context work). The rate is the median of the newest
    programs of that size. For a size without measurements, seconds are extrapolated from the next
    smaller size with the square root of the size: between constant (reading weights) and
    proportional (GEMMs). Without a smaller size, the rate is that of the next larger one. Both
    guesses are rather too fast, so that the size is tried and measured.
    """

    def __init__(self) -> None:
        self._rates: dict[int, collections.deque[float]] = {}  # key: size
        self._steps: collections.deque[float] = collections.deque(maxlen=NEWEST)

    def learn_reading(self, size: int, work: float, seconds: float) -> None:
        """Adds a measured prefill program. size: padded tokens. work: their context work."""
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
        """Seconds per token at position 0. Needs at least one measured program."""
        medians = {each: statistics.median(rates) for each, rates in self._rates.items()}
        smaller = [each for each in medians if each < size]
        if size in medians:
            return min([medians[size], *(SLOWER * medians[each] for each in smaller)])
        if smaller:
            return self.rate(max(smaller)) * math.sqrt(max(smaller) / size)
        return medians[min(medians)]

    def seconds(self, size: int, work: float) -> float:
        """The predicted seconds of a prefill program; inf before any was measured."""
        return self.rate(size) * (size + work) if self._rates else math.inf

    def choose(
        self, sizes: Sequence[int], rows: Sequence[tuple[int, int]], gap: float
    ) -> tuple[int, float]:
        """The size of the next prefill program, and the most context work of its tokens.

        sizes: the compiled prefill sizes, ascending. rows: for each row with tokens to prefill, in
            order, the position of the first and their number.
        gap: seconds until the next token of decoding rows, whose step follows the program; inf
            without decoding rows.

        Of the sizes that fit into the gap, it is the one with the most tokens per second, counting
        the decoding step; of equal ones the largest. Context work isn't counted, since it is the
        same for any size. If none fits, it is the smallest size, with little context work. Before
        any measurement, seconds are taken to grow with the square root of the size; with a finite
        gap the second-smallest size is chosen.
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
    """The number of the rows' tokens that fit into a prefill program.

    rows: (position of the first token, number of tokens) of each. size: the most tokens. work: the
    most context work.
    """
    tokens = 0
    for start, count in rows:
        taken = min(count, size - tokens, tokens_within(start, work))
        tokens, work = tokens + taken, work - context_work(start, taken)
        if taken < count:
            break
    return tokens
