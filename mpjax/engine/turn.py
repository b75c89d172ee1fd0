"""The lock for steps of an engine."""

from __future__ import annotations

import threading


class Turn:
    """A lock for steps that raises ValueError instead of deadlocking if its holder takes it again.

    An observer of programs is called within a step, and might call `step` again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()  # whose turn is next: no thread can take all turns
        self._holder: int | None = None  # the thread that holds the lock

    def require_other(self) -> None:
        """Raises ValueError in the thread that holds the turn."""
        if self._holder == threading.get_ident():
            raise ValueError(
                "a step of the engine runs, and waits for its observer: an observer may submit and "
                "cancel requests, but not run, stop or close the engine"
            )

    def take_within(self, seconds: float) -> bool:
        """Takes the turn unless its holder keeps it for longer; returns whether it did."""
        is_taken = self._lock.acquire(timeout=seconds)
        if is_taken:
            self._holder = threading.get_ident()
        return is_taken

    def __enter__(self) -> None:
        """Waits for the turn. Raises ValueError in the thread that holds it."""
        self.require_other()
        with self._next:
            self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()
