from __future__ import annotations

import re

import pytest

from mpjax.bench.agreement_plot import draw, frontier

pytestmark = pytest.mark.any_version


def row(precision: str, bits: float, divergence: float) -> dict:
    return {
        "precision": precision,
        "bits_per_weight": bits,
        "kl_mean": divergence,
        "perplexity": 10 + divergence,
        "reference_perplexity": 10.0,
    }


def test_every_precision_is_drawn_and_named(tmp_path):
    rows = [row("W16A16KV16", 16, 0.0), row("W8A8KV16", 8, 0.001), row("WNF4A16KV16", 4.5, 0.02)]
    draw(rows, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    found = set(re.findall(r"<text[^>]*>([^<]*)</text>", text))
    assert {row["precision"] for row in rows} <= found
    assert {"bits per weight", "mean KL divergence, nats", "rise of perplexity, %"} <= found


@pytest.mark.parametrize("divergence", [0.0, 0.5])
def test_a_single_row_is_drawn(tmp_path, divergence):
    draw([row("W16A16KV16", 16, divergence)], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_the_frontier_has_what_nothing_smaller_surpasses():
    bits, losses = [16, 4.25, 4.25, 8, 3], [0.0, 0.03, 0.02, 0.03, 0.1]
    assert frontier(bits, losses) == [4, 2, 0]
