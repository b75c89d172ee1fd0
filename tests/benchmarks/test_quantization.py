from __future__ import annotations

import json

import pytest

from benchmarks import quantization


def test_fewer_bits_and_large_channels_cost_more_where_scales_are_the_tokens():
    rows = {
        row["format"]: row["errors"]
        for row in quantization.run(("KV16", "KV8", "KV4t", "KV4c"), 512)
    }
    for kind in quantization.KINDS:
        assert rows["KV16"][kind] < 0.003 < rows["KV8"][kind] < rows["KV4c"][kind]
    assert rows["KV4t"]["large channels"] > 2 * rows["KV4t"]["normal"]
    assert rows["KV4c"]["large channels"] < 1.5 * rows["KV4c"]["normal"]


@pytest.mark.parametrize("text", ["KV8s", "KVfp8", "KV2"])
def test_formats_with_given_scales_and_with_tokens_that_wait(text):
    [row] = quantization.run((text,), 512)
    assert 0.005 < row["errors"]["normal"] < 1
    assert quantization.cells(row)[0] == text


def test_results_are_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "RESULTS", tmp_path)
    monkeypatch.setattr(quantization, "FORMATS", ("KV16",))
    monkeypatch.setattr(quantization, "TOKENS", 256)
    quantization.main()
    [row] = json.loads((tmp_path / "quantization.json").read_text())["results"]
    assert row["format"] == "KV16"
    assert "quantization.json" in capsys.readouterr().out
