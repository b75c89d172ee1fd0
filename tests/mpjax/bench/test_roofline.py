from __future__ import annotations

import re

import pytest

from mpjax.bench import gemm, roofline
from mpjax.bench.agreement_plot import frontier
from mpjax.bench.figures import COLORS
from tests.mpjax.bench.rows import gemm_row


def labels(svg):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_more_formats_than_colors_can_be_told_apart(tmp_path):
    names = [f"table4:g{size}" for size in range(len(COLORS) + 1)]
    rows = [gemm_row(format=name, M=m) for name in names for m in (1, 16)]
    roofline.draw_gemm(rows, tmp_path / "gemm.svg")
    text = (tmp_path / "gemm.svg").read_text()
    assert set(names) <= labels(text)
    hollow = rf"fill: #ffffff; stroke: {COLORS[0]}"
    assert len(re.findall(hollow, text)) >= 2, "the first color's second format is not hollow"


def test_the_memory_roof_is_the_floor_up_to_the_compute_roof():
    rows = [gemm.figures(gemm_row(M=m, microseconds=20.0 * m)) for m in (1, 16, 4096)]
    # The floor of 10 µs allows 4 TFLOP/s for each row of x: 400 are reached at M = 100.
    x, y = roofline.memory_roof(rows, 400.0)
    assert x == pytest.approx([1, 100])
    assert y == pytest.approx([4, 400])
    assert roofline.memory_roof(rows, 1e6)[0] == pytest.approx([1, 4096])
    assert roofline.memory_roof(rows[2:], 400.0) == ([], [])


def test_the_frontier_has_what_nothing_smaller_surpasses():
    bits, losses = [16, 4.25, 4.25, 8, 3], [0.0, 0.03, 0.02, 0.03, 0.1]
    assert frontier(bits, losses) == [4, 2, 0]
