"""Measures how long programs take, and how long the device idles."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Measures programs by when the host launches them and when their results arrive.

    A program begins when the previous one has ended, or when it is launched if that is later.

    work_seconds: total length of the periods with requests, each from the launch of its first
        program to the results of its last. idle_seconds: the part of work_seconds in which the
        device may have been idle. If all programs have ended when the next one is launched, it
        counts from the previous results on, since the host doesn't know when the device became
        idle: an upper bound.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since: float | None = None  # seconds are counted up to this time; None: no requests
        self.work_seconds = self.idle_seconds = 0.0

    def start(self, *, is_free: bool) -> float:
        """Notes that a program is about to be launched; returns the current time.

        is_free: whether the device has finished all earlier programs.
        """
        now = self._now()
        if is_free and self._since is not None:
            self.idle_seconds += now - self._since
            self.work_seconds += now - self._since
        if is_free:
            self._since = now
        return now

    def end(self, start: float) -> tuple[float, float]:
        """Notes that a program's results have arrived; returns its begin and its seconds.

        start: the launch time, as `start` returned it.
        """
        now = self._now()
        begin = start if self._since is None else max(start, self._since)
        self.work_seconds += now - begin
        self._since = now
        return begin, now - begin

    def skip(self) -> None:
        """Doesn't count the seconds up to now, in which a program was compiled."""
        self._since = self._now()

    def rest(self) -> None:
        """Notes that there are no requests."""
        self._since = None
