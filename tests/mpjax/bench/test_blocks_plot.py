from __future__ import annotations

import re

import pytest

from mpjax.bench.blocks_plot import draw

pytestmark = pytest.mark.any_version


def test_lines_and_levels_are_drawn_and_named(tmp_path):
    rows = [{"precision": "W16A16", "rise": 0.0}, {"precision": "W4A8", "rise": 0.1}]
    for ordered in (True, False):
        for share in (0.0, 0.5, 1.0):
            found = {"rise": 0.3 - 0.2 * share, "wide": share, "ordered": ordered}
            rows.append({"precision": "W4Ax"} | found)
    draw(rows, tmp_path / "plot.svg")
    texts = set(re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "plot.svg").read_text()))
    assert {"channels sorted", "channels as they are", "W4A8", "blocks in 8 bits, %"} <= texts
    assert "W16A16" not in texts
