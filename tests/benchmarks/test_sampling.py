from __future__ import annotations

import pytest

from benchmarks import sampling


@pytest.fixture
def rows(monkeypatch):
    """Two rows of a small vocabulary, without a profiler."""
    monkeypatch.setattr(sampling.measure, "microseconds", lambda *_, **__: 32.0)
    return list(sampling.run([2], 1000))


def test_a_search_and_a_sort_draw_the_same_tokens(rows):
    assert [(row["drawn"], row["by"]) for row in rows] == [
        ("greedy", ""),
        ("temperature", ""),
        *((name, by) for name in ("top-k", "top-p", "both") for by in ("search", "sort")),
    ]
    assert all(row["same_tokens"] for row in rows)


def test_a_row_has_a_text_for_each_header(rows):
    found = sampling.cells(rows[2])
    assert len(found) == len(sampling.HEADERS)
    assert found[:4] == ["2", "top-k", "search", "2.0 µs"]
