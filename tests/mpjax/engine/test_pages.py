from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.engine.pages import NOWHERE, PagePool, page_key

pytestmark = pytest.mark.any_version


def keys(*texts):
    found = [b""]
    for text in texts:
        found.append(page_key(found[-1], text))
    return found[1:]


def test_a_key_depends_on_all_tokens_before():
    first, other = keys([1, 2], [3, 4]), keys([1, 1], [3, 4])
    assert first[1] != other[1]
    assert first == keys([1, 2], [3, 4])
    assert page_key(b"", [1, 2]) != page_key(b"", [1, 2, 0])


def test_pages_come_once_and_go_back():
    pool = PagePool(4)
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    assert pool.allocate(1) is None
    pool.release([2, NOWHERE, 3])
    assert pool.available == 2
    assert sorted(pool.allocate(2) or []) == [2, 3]


def test_published_pages_are_found_until_they_are_needed():
    pool, (a, b, c) = PagePool(4), keys([1], [2], [3])
    pages = pool.allocate(3) or []
    for page, key in zip(pages, (a, b, c), strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert (pool.available, pool.kept) == (3, 3)
    assert pool.find([a, b, c]) == pages
    assert pool.idle_of(pages) == 3
    pool.share(pages[:1])
    assert (pool.references(pages[0]), pool.kept) == (1, 2)
    # The last page of a text goes first, and one that is in use never.
    assert pool.allocate(1) == pages[2:]
    assert pool.find([a, b, c]) == [*pages[:2], NOWHERE]
    assert pool.allocate(2) is None
    assert pool.allocate(1) == pages[1:2]
    assert pool.find([a]) == pages[:1]


def test_the_first_page_of_a_content_stays_the_one():
    pool, (a,) = PagePool(3), keys([1])
    first, second = pool.allocate(2) or []
    pool.publish(first, a)
    pool.publish(second, a)
    pool.publish(NOWHERE, keys([9])[0])
    pool.release([second])
    assert (pool.find([a]), pool.kept, pool.available) == ([first], 0, 1)


def test_a_page_is_free_without_owner_and_content():
    pool, (a,) = PagePool(4), keys([1])
    first, second, third = pool.allocate(3) or []
    pool.publish(first, a)
    pool.release([first, second])
    assert [pool.is_free(page) for page in (first, second, third)] == [False, True, False]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_no_page_is_lost_or_owned_twice(moves):
    pool, owners, content = PagePool(8), [], keys([0], [1], [2])
    for move in moves:
        if move < 4 and (pages := pool.allocate(1 + move)) is not None:
            owners.append(pages)
            for page, key in zip(pages, content, strict=False):
                pool.publish(page, key)
        elif move < 6 and any(shared := pool.find(content)):
            pool.share(shared)
            owners.append(shared)
        elif owners:
            pool.release(owners.pop(move % len(owners)))
        held = [page for pages in owners for page in pages if page != NOWHERE]
        assert all(pool.references(page) == held.count(page) for page in range(1, 8))
        assert pool.available + len(set(held)) == 7
