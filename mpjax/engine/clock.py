"""Measures how long programs take, and how long the device waits for the host."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Measures programs by what the host sees: when it starts one, and when its results are there.

    A program begins when the one before it has ended, or when it was started, if that is later.

    work_seconds: from the start of the first program of each time with requests until the results
        of its last. idle_seconds: of them, those in which the device may have had nothing to do: up
        to the start of a program before which the device had ended all others. When it ended them
        is not known, so they count from the results before.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since: float | None = None  # up to when seconds are counted; None without requests
        self.work_seconds = self.idle_seconds = 0.0

    def start(self, *, is_free: bool) -> float:
        """A program is about to be started; returns the time.

        is_free: whether the device has ended all others.
        """
        now = self._now()
        if is_free and self._since is not None:
            self.idle_seconds += now - self._since
            self.work_seconds += now - self._since
        if is_free:
            self._since = now
        return now

    def end(self, start: float) -> tuple[float, float]:
        """The results of a program are there; returns when it began, and its seconds.

        start: when it was started.
        """
        now = self._now()
        begin = start if self._since is None else max(start, self._since)
        self.work_seconds += now - begin
        self._since = now
        return begin, now - begin

    def skip(self) -> None:
        """Leaves out the seconds up to now, in which a program was compiled."""
        self._since = self._now()

    def rest(self) -> None:
        """There is no request left, or none has come yet."""
        self._since = None
