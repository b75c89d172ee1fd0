from __future__ import annotations

import pytest

from mpjax.engine.row import Row
from tests.mpjax.rotary_lengths import ORIGINAL, SCALINGS

pytestmark = pytest.mark.any_version


def test_lengths_are_bounds_until_results_are_known():
    row = Row(0, [1, 2, 3], 3, most=12, length=3)
    row.draw(1, 1)
    assert (row.length, row.drawn, row.left) == (3, 1, 11)
    row.learn([7])
    assert (row.length, row.drawn) == (3, 1)
    assert row.growth(5) == 5
    row.draw(1, 5)
    assert row.growth(5) == 5
    row.draw(1, 5)
    assert (row.length, row.drawn) == (13, 3)
    assert row.growth(5) == 1  # of 12 new tokens the last is not in the cache
    row.learn([8, 9])
    assert (row.length, row.drawn, row.growth(5)) == (10, 4, 4)
    row.learn([10])
    assert (row.tokens, row.length, row.drawn, row.flights) == ([1, 2, 3, 7, 8, 9, 10], 6, 4, [])


@pytest.mark.parametrize(("kind", "lengths"), [("longrope", [0, 25]), ("dynamic", [0, 0])])
def test_a_row_knows_when_it_has_to_be_read_again(kind, lengths):
    row = Row(0, list(range(20)), 20, 40, scaling=SCALINGS[kind])
    row.set_rotary_length()
    keys = row.page_keys(1, 16)
    row.draw(1, 9)
    assert row.length == (ORIGINAL if kind == "longrope" else 28)
    assert row.can_draw == (kind == "dynamic")
    row.learn(range(ORIGINAL + 1 - 20))
    assert (row.length, row.has_to_reread) == (ORIGINAL, kind == "longrope")
    found = [row.rotary_length]
    row.set_rotary_length()
    assert [*found, row.rotary_length] == lengths
    assert (row.page_keys(1, 16) == keys) == (kind == "dynamic")
    assert not row.has_to_reread
