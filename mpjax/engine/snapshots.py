"""Snapshots: copies of a sequence's recurrent states, for sharing prefixes of hybrid models."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The cached prefix of a row.

    pages: pages of each group of layers. count: the prefix's length in pages. snapshot: the place
    of the recurrent states after it, or None. known: number of pages that all groups hold, at least
    `count`.
    """

    pages: list[list[int]]
    count: int
    snapshot: int | None = None
    known: int = 0


class SnapshotPool:
    """A pool of places for snapshots, with the page key of each published one.

    places: indices after the engine's slots; empty for models without recurrent layers.

    A row takes a place, and either publishes it under the key of the page that ends there, once the
    states are known to be finite, or drops it. When no place is free, the least recently used
    published one is reused.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.count = len(places)
        self._free = list(reversed(places))
        self._idle: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    @property
    def kept(self) -> int:
        """The number of snapshots that rows can begin from."""
        return len(self._idle)

    def has(self, key: bytes) -> bool:
        """Whether there is a snapshot under a key."""
        return key in self._idle

    def use(self, key: bytes) -> int:
        """The place of the snapshot under a key, which later calls of `take` may reuse.

        The caller copies the snapshot before the next prefill program.
        """
        self._idle.move_to_end(key)
        return self._idle[key]

    def take(self) -> int | None:
        """Takes a place for a row; None if rows hold all places."""
        if self._free:
            return self._free.pop()
        return self._idle.popitem(last=False)[1] if self._idle else None

    def publish(self, place: int, key: bytes) -> None:
        """Registers a taken place under a key; frees it if the key has one already."""
        if key in self._idle:
            self._free.append(place)
        else:
            self._idle[key] = place

    def forget(self) -> None:
        """Removes all published snapshots and frees their places, such as for new weights.

        Places that rows hold stay taken.
        """
        self._free.extend(self._idle.values())
        self._idle.clear()

    def drop(self, place: int) -> None:
        """Gives back a place that was taken."""
        self._free.append(place)
