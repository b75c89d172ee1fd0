"""The pages of an engine's cache: which are free, which are shared, and by what they are found."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

NOWHERE = 0  # a page that no sequence owns: entries of block tables without a page name it


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page's content: a hash of its tokens, and of the key of the page before.

    Keys and values depend on all earlier tokens, so the key of the page before belongs to it.
    before: for the first page of a row, `first_key`.
    """
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()


def first_key(rotary_length: int) -> bytes:
    """The key before that of the first page, for a row that is read with this rotary length."""
    return rotary_length.to_bytes(8) if rotary_length else b""


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
        """The pages that are published under the first keys, up to the first unknown one."""
        found = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            found.append(page)
        return found

    def idle_of(self, pages: Sequence[int]) -> int:
        """The number of these pages that no sequence owns."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def publish(self, page: int, key: bytes) -> None:
        """Lets others find a page, whose content is final, unless its content is known already."""
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
