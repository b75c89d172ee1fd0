from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import blocks
from mpjax.models import llama_layers

pytestmark = pytest.mark.any_version

SMALL = dataclasses.replace(
    blocks.PLANTED,
    vocab_size=64,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    layers=llama_layers((None,), 256),
)


@pytest.mark.sweep
def test_a_row_for_each_share_and_order(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(blocks, "PLANTED", SMALL)
    monkeypatch.setattr(blocks, "SHARES", (0, 2, 1))
    monkeypatch.setattr(blocks, "METHOD", "rtn")
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    blocks.main(["planted"])
    rows = json.loads((tmp_path / "blocks-planted.json").read_text())["results"]
    assert [row["precision"] for row in rows] == ["W16A16", "W4A16", "W4A8", *["W4Ax"] * 6]
    assert [row["wide"] for row in rows[3:6]] == [0, 0.5, 1]
    for line in (rows[3:6], rows[6:]):
        assert line[0]["perplexity"] > line[1]["perplexity"] > line[2]["perplexity"]
    assert rows[4]["rise"] < 0.5 * rows[3]["rise"]  # the outliers' blocks do most
    assert "blocks-planted.json" in capsys.readouterr().out
