"""The pages of an engine's cache: which are free, which are shared, and by which keys."""

from __future__ import annotations

import collections
import hashlib
import sys
from collections.abc import Sequence

import numpy as np

from mpjax.engine.snapshots import Prefix, SnapshotPool

NOWHERE = 0  # a page that no sequence owns: entries of block tables without a page name it
WINDOW_SLACK = 256  # a tile of attention may begin before the window, by less than this


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page's content: a hash of its tokens, and of the key of the page before.

    Keys and values depend on all earlier tokens, so the key of the page before belongs to it.
    before: for the first page of a row, `first_key`.
    """
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()


def first_key(rotary_length: int, adapter: bytes = b"") -> bytes:
    """The key before that of the first page of a row.

    rotary_length: with which the row is read. adapter: the key of its adapter, 8 bytes, or none.
    """
    return rotary_length.to_bytes(8) + adapter if rotary_length or adapter else b""


class PagePool:
    """Counts references to pages, and keeps the content of released pages while there is room.

    count: the number of pages, NOWHERE included.

    A page is owned by one sequence, or shared by several that begin with the same tokens. Pages
    that are published under a key stay when the last sequence releases them. They are given to
    others when no page is free, those first whose last use is longest ago.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = collections.deque(range(1, count))
        self._references = [0] * count
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """The number of pages that `allocate` can give: free ones, and idle ones with content."""
        return len(self._free) + len(self._idle)

    @property
    def kept(self) -> int:
        """The number of pages that no sequence owns and that are kept for their content."""
        return len(self._idle)

    def references(self, page: int) -> int:
        """The number of sequences that own a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """Pages for one sequence, or None if so many are not available."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The page that is published under each key; NOWHERE for unknown ones."""
        return [self._pages.get(key, NOWHERE) for key in keys]

    def idle_of(self, pages: Sequence[int]) -> int:
        """The number of these pages that no sequence owns."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to each page but NOWHERE."""
        for page in pages:
            if page == NOWHERE:
                continue
            self._references[page] += 1
            self._idle.pop(page, None)

    def publish(self, page: int, key: bytes) -> None:
        """Registers a page, whose content is final, by its key; no effect for a known content."""
        if page != NOWHERE and key not in self._pages and page not in self._keys:
            self._keys[page], self._pages[key] = key, page

    def is_free(self, page: int) -> bool:
        """Whether a page has no owner, and no content that others can find."""
        return not self._references[page] and page not in self._keys

    def release(self, pages: Sequence[int]) -> None:
        """Takes an owner from each page but NOWHERE.

        The last pages are reused first, since the first ones are part of more texts.
        """
        for page in reversed(pages):
            if page == NOWHERE:
                continue
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _take_one(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._pages[self._keys.pop(page)]
        self._references[page] = 1
        return page


class PageGroups:
    """A pool of pages for each group of layers (`DecoderConfig.page_groups`).

    counts: pages of each group, NOWHERE included. windows: of each group, None where all earlier
    tokens are read. page_size: tokens in a page. unit: tokens of the smallest prefix that can be
    shared. snapshots: where rows can begin only from states that were kept, the places of these.

    The pages of a row are a list for each group, in the order of its tokens; a page before the
    window of a group becomes NOWHERE.
    """

    def __init__(
        self,
        counts: Sequence[int],
        windows: Sequence[int | None],
        page_size: int,
        unit: int,
        snapshots: Sequence[int] = (),
    ) -> None:
        self.pools = [PagePool(count) for count in counts]
        self.windows = list(windows)
        self.page_size, self.unit = page_size, unit
        self.snapshots = SnapshotPool(snapshots)

    @property
    def pages(self) -> int:
        """The number of pages of all groups."""
        return sum(pool.count - 1 for pool in self.pools)

    @property
    def available(self) -> int:
        """The number of pages of all groups that rows can get."""
        return sum(pool.available for pool in self.pools)

    @property
    def kept(self) -> int:
        """The number of pages of all groups that are kept for their content, without an owner."""
        return sum(pool.kept for pool in self.pools)

    def why_never(self, tokens: int) -> str | None:
        """The reason why no row can have so many tokens in the cache; None if one can.

        Of a group with a window, a row that is alone needs pages for the window and a few more.
        """
        needed = self._pages_for(tokens)
        for pool, window in zip(self.pools, self.windows, strict=True):
            least = needed
            if window is not None:
                least = min(needed, self._pages_for(window + WINDOW_SLACK) + 2)
            if least > pool.count - 1:
                return f"the cache holds {(pool.count - 1) * self.page_size} tokens"
        return None

    def find_prefix(self, keys: Sequence[bytes]) -> Prefix:
        """The longest prefix that all groups hold, by the keys of its pages.

        A group with a window needs the last of them alone, and has NOWHERE before. Where there are
        places of snapshots, the prefix ends with one.
        """
        found = [pool.find(keys) for pool in self.pools]
        of_unit = self.unit // self.page_size
        known = 0
        for count in range(len(keys) // of_unit * of_unit, 0, -of_unit):
            begins = [self._first_needed(window, count) for window in self.windows]
            if all(
                NOWHERE not in pages[begin:count]
                for pages, begin in zip(found, begins, strict=True)
            ):
                known = known or count
                ends = keys[count - 1]
                if self.snapshots.count and not self.snapshots.has(ends):
                    continue
                pages = [
                    [NOWHERE] * begin + own[begin:count]
                    for own, begin in zip(found, begins, strict=True)
                ]
                place = self.snapshots.use(ends) if self.snapshots.count else None
                return Prefix(pages, count, place, known)
        return Prefix([[] for _ in self.pools], 0, None, known)

    def begin(self, shared: list[list[int]], tokens: int, headroom: int) -> list[list[int]] | None:
        """The pages of a row that is to read `tokens` tokens; None where too few are available.

        shared: of a prefix, as `find_prefix` returns it. headroom: pages of each group that have to
        stay. A group with a window gives the pages of a piece only when it is read (`grow`).
        """
        needed = [
            0 if window is not None else self._pages_for(tokens) - len(own)
            for own, window in zip(shared, self.windows, strict=True)
        ]
        for pool, own, count in zip(self.pools, shared, needed, strict=True):
            if pool.available - pool.idle_of(own) < max(count, 1) + headroom:
                return None
        for pool, own in zip(self.pools, shared, strict=True):
            pool.share(own)
        return [
            own + (pool.allocate(count) or [])
            for pool, own, count in zip(self.pools, shared, needed, strict=True)
        ]

    def grow(self, pages: list[list[int]], tokens: int) -> bool:
        """Adds pages to a row until they hold so many tokens; False, and none, if they lack."""
        needed = [max(self._pages_for(tokens) - len(own), 0) for own in pages]
        pairs = zip(self.pools, needed, strict=True)
        if any(count > pool.available for pool, count in pairs):
            return False
        for pool, own, count in zip(self.pools, pages, needed, strict=True):
            own.extend(pool.allocate(count) or [])
        return True

    def room(self, pages: list[list[int]]) -> int:
        """The most tokens up to which `grow` can add pages to a row."""
        counts = [len(own) + pool.available for pool, own in zip(self.pools, pages, strict=True)]
        return min(counts) * self.page_size if counts else sys.maxsize

    def release(self, pages: list[list[int]]) -> None:
        """Takes an owner from all pages of a row."""
        for pool, own in zip(self.pools, pages, strict=True):
            pool.release(own)

    def unowned(self, pages: list[list[int]]) -> list[list[int]]:
        """Of pages that a row has released, those that nobody else owns or can find."""
        return [
            [page for page in own if page != NOWHERE and pool.is_free(page)]
            for pool, own in zip(self.pools, pages, strict=True)
        ]

    def publish(self, pages: list[list[int]], begin: int, keys: Sequence[bytes]) -> None:
        """Registers pages of a row by their keys, from number `begin` on."""
        for pool, own in zip(self.pools, pages, strict=True):
            for number in range(begin, len(keys)):
                pool.publish(own[number], keys[number])

    def free_before_window(self, pages: list[list[int]], query: int) -> None:
        """Releases pages of a row that lie before the windows of all queries from `query` on."""
        for pool, own, window in zip(self.pools, pages, self.windows, strict=True):
            for entry in range(self._first_seen(window, query) - 1, -1, -1):
                if own[entry] == NOWHERE:
                    break
                pool.release([own[entry]])
                own[entry] = NOWHERE

    def _first_needed(self, window: int | None, pages: int) -> int:
        """The first page that a row behind a prefix of so many pages needs."""
        return self._first_seen(window, pages * self.page_size)

    def _first_seen(self, window: int | None, query: int) -> int:
        """The first page that a query at this position may read."""
        return 0 if window is None else max(query - window - WINDOW_SLACK, 0) // self.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
