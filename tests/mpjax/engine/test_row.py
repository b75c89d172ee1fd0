from __future__ import annotations

import pytest

from mpjax.engine.row import Row

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
