from __future__ import annotations

import gc

import pytest

from mpjax.serve.garbage import short_collections

pytestmark = pytest.mark.any_version


def test_older_objects_are_left_out_of_collections():
    """Garbage that is made inside is collected."""
    before = gc.get_freeze_count()
    older = [[] for _ in range(1000)]
    with short_collections():
        assert gc.get_freeze_count() > before + len(older)
        assert all(not any(one is each for each in gc.get_objects()) for one in older[:2])
        newer: list[list] = [[]]
        newer[0].append(newer)  # a cycle
        del newer
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
