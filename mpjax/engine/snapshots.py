"""Snapshots: copies of what recurrent layers keep for a sequence, behind some of its tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The first tokens of a row that the cache holds.

    pages: of each group of layers. count: whole pages of tokens. snapshot: the place of the states
    behind them; None for none. known: whole pages that all groups hold, `count` or more.
    """

    pages: list[list[int]]
    count: int
    snapshot: int | None = None
    known: int = 0


class SnapshotPool:
    """The places of snapshots: which are free, and which hold the states behind which tokens.

    places: behind the slots of an engine; empty for models without such states.

    A place is taken for a row, which publishes it under the key of the page that ends there once
    the states are known to be finite, or drops it. Published ones are given to others when none is
    free, those first whose last use is longest ago.
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
        """The place under a key, which has to be copied before the next program that reads."""
        self._idle.move_to_end(key)
        return self._idle[key]

    def take(self) -> int | None:
        """A place for a row; None where rows hold all."""
        if self._free:
            return self._free.pop()
        return self._idle.popitem(last=False)[1] if self._idle else None

    def publish(self, place: int, key: bytes) -> None:
        """Lets others find a place that was taken, unless the key has one already."""
        if key in self._idle:
            self._free.append(place)
        else:
            self._idle[key] = place

    def drop(self, place: int) -> None:
        """Gives back a place that was taken."""
        self._free.append(place)
