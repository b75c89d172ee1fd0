from __future__ import annotations

import sys

import pytest

from mpjax.bench import figures


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "mpjax.bench.figures")
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        import mpjax.bench.figures  # noqa: F401


def test_a_figure_is_written_the_same_each_time(tmp_path):
    for name in ("a.svg", "new/b.svg"):
        with figures.figure_of(tmp_path / name, (2, 2)) as figure:
            figure.subplots().plot([1, 2])
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "new/b.svg").read_text()
