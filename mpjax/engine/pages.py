"""Allocation of the cache's pages, with reference counts, and the prefix cache."""

from __future__ import annotations

import collections
import hashlib
import sys
from collections.abc import Sequence

import numpy as np

from mpjax.engine.snapshots import Prefix, SnapshotPool

NOWHERE = 0  # the index of a page without an owner, in entries of block tables that have no page
WINDOW_SLACK = 256  # an attention tile may begin up to this many tokens before the window


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The prefix-cache key of a page: SHA-256 of the previous page's key and the page's tokens.

    The previous key is included because keys and values depend on all earlier tokens. before: the
    previous page's key; `first_key` for the first page of a row.
    """
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()


def first_key(rotary_length: int, adapter: bytes = b"", steer: bytes = b"") -> bytes:
    """The `before` of the key of a row's first page.

    rotary_length: of the row. adapter: the key of the row's adapter, 8 bytes; empty for none.
    steer: the key of its changes of activations, 32 bytes; empty for none.
    """
    behind = adapter + steer  # each combination has another length
    return rotary_length.to_bytes(8) + behind if rotary_length or behind else b""


class PagePool:
    """A pool of reference-counted pages, which keeps released pages for reuse as long as possible.

    count: the number of pages, including NOWHERE.

    A page is owned by one sequence, or shared by several with the same first tokens. Pages
    published under a key are kept when their last owner releases them. When no page is free, the
    least recently used of them is reused.
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
        """The number of pages that can be allocated: free ones, and kept ones without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def kept(self) -> int:
        """The number of pages without an owner that are kept in the prefix cache."""
        return len(self._idle)

    def references(self, page: int) -> int:
        """The number of sequences that own a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` pages to one sequence; None if fewer are available."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The page published under each key; NOWHERE for unknown keys."""
        return [self._pages.get(key, NOWHERE) for key in keys]

    def idle_of(self, pages: Sequence[int]) -> int:
        """The number of these pages that no sequence owns."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to each page except NOWHERE."""
        for page in pages:
            if page == NOWHERE:
                continue
            self._references[page] += 1
            self._idle.pop(page, None)

    def publish(self, page: int, key: bytes) -> None:
        """Registers a page with final content in the prefix cache; no-op if the key is known."""
        if page != NOWHERE and key not in self._pages and page not in self._keys:
            self._keys[page], self._pages[key] = key, page

    def forget(self) -> None:
        """Removes all pages from the prefix cache, and frees those without an owner."""
        self._free.extend(self._idle)
        for known in (self._idle, self._keys, self._pages):
            known.clear()

    def is_free(self, page: int) -> bool:
        """Whether a page has no owner and isn't in the prefix cache."""
        return not self._references[page] and page not in self._keys

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from each page except NOWHERE.

        The last pages are reused first, since the first ones belong to more prompts.
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

    counts: pages of each group, including NOWHERE. windows: sliding window of each group in tokens,
    None for full attention. page_size: tokens in a page. unit: tokens of the smallest prefix that
    can be shared. snapshots: places of the snapshots of recurrent states; empty without recurrent
    layers.

    The pages of a row are a list for each group, in token order; NOWHERE stands for pages before
    the group's window.
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
        """The number of pages of all groups that can be allocated."""
        return sum(pool.available for pool in self.pools)

    @property
    def kept(self) -> int:
        """The number of pages of all groups without an owner that are kept in the prefix cache."""
        return sum(pool.kept for pool in self.pools)

    def why_never(self, tokens: int) -> str | None:
        """The reason why no row can have `tokens` tokens in the cache; None if one can.

        In a group with a window, a single row needs pages for the window and a few more.
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
        """The longest cached prefix of a row. keys: of the row's pages.

        A group with a window needs only the pages of the last window, and has NOWHERE before. With
        recurrent layers, the prefix ends at a snapshot.
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
        """The pages for prefilling `tokens` tokens of a row; None if too few are available.

        shared: the pages of the row's cached prefix. headroom: pages of each group that must stay
        available. In a group with a window, pages are allocated chunk by chunk (`grow`).
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
        """Adds pages to a row up to `tokens` tokens; False, adding none, if too few are left."""
        needed = [max(self._pages_for(tokens) - len(own), 0) for own in pages]
        pairs = zip(self.pools, needed, strict=True)
        if any(count > pool.available for pool, count in pairs):
            return False
        for pool, own, count in zip(self.pools, pages, needed, strict=True):
            own.extend(pool.allocate(count) or [])
        return True

    def room(self, pages: list[list[int]]) -> int:
        """The most tokens that a row's pages can be grown to."""
        counts = [len(own) + pool.available for pool, own in zip(self.pools, pages, strict=True)]
        return min(counts) * self.page_size if counts else sys.maxsize

    def release(self, pages: list[list[int]]) -> None:
        """Removes an owner from all pages of a row."""
        for pool, own in zip(self.pools, pages, strict=True):
            pool.release(own)

    def forget(self) -> None:
        """Removes all pages and snapshots from the prefix cache, such as those of older weights."""
        self.snapshots.forget()
        for pool in self.pools:
            pool.forget()

    def unowned(self, pages: list[list[int]]) -> list[list[int]]:
        """The pages, of those that a row has released, that have no owner and no key."""
        return [
            [page for page in own if page != NOWHERE and pool.is_free(page)]
            for pool, own in zip(self.pools, pages, strict=True)
        ]

    def publish(self, pages: list[list[int]], begin: int, keys: Sequence[bytes]) -> None:
        """Registers a row's pages under their keys, from index `begin` on."""
        for pool, own in zip(self.pools, pages, strict=True):
            for number in range(begin, len(keys)):
                pool.publish(own[number], keys[number])

    def free_before_window(self, pages: list[list[int]], query: int) -> None:
        """Releases a row's pages that lie before the windows of all queries from `query` on."""
        for pool, own, window in zip(self.pools, pages, self.windows, strict=True):
            for entry in range(self._first_seen(window, query) - 1, -1, -1):
                if own[entry] == NOWHERE:
                    break
                pool.release([own[entry]])
                own[entry] = NOWHERE

    def _first_needed(self, window: int | None, pages: int) -> int:
        """The index of the first page that a row needs after a prefix of `pages` pages."""
        return self._first_seen(window, pages * self.page_size)

    def _first_seen(self, window: int | None, query: int) -> int:
        """The index of the first page that a query at position `query` attends to."""
        return 0 if window is None else max(query - window - WINDOW_SLACK, 0) // self.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
