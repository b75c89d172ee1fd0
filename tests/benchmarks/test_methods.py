from __future__ import annotations

import json

import pytest

import mpjax
from benchmarks import methods

pytestmark = pytest.mark.any_version

LITTLE = mpjax.Calibration(window=64, tokens=1024, batch=4)


@pytest.mark.sweep
def test_a_row_for_each_method(tmp_path, monkeypatch, capsys):
    text, held_out = methods.python_source()
    short = [document[:1500] for document in text[:2]], [held_out[0][:1500]]
    monkeypatch.setattr(methods, "RESULTS", tmp_path)
    monkeypatch.setattr(methods, "CASES", {"WNF3A16KV16": ("rtn", "rtn+learn_scales")})
    monkeypatch.setattr(methods, "CALIBRATION", LITTLE)
    monkeypatch.setattr(methods, "python_source", lambda: short)
    monkeypatch.setattr(methods.run, "__defaults__", (LITTLE,))
    learned = []

    def learn(lm, documents, *, reference, **options):
        learned.append((lm.precision, reference.precision))
        return reference

    monkeypatch.setattr(mpjax, "learn_scales", learn)
    methods.main([])
    rows = json.loads((tmp_path / "methods.json").read_text())["results"]
    assert [row["method"] for row in rows] == ["", "rtn", "rtn+learn_scales"]
    assert rows[1]["rise"] > 0.05
    assert rows[2]["rise"] == 0
    assert [reference for _, reference in learned] == ["W16A16KV16"]
    assert "methods.json" in capsys.readouterr().out
    (tmp_path / "methods.json").unlink()
    monkeypatch.setattr(methods, "run", lambda *arguments: iter([{"cases": [*arguments[3]]}]))
    methods.main(["--precisions", "WNF3A16KV16"])
    assert json.loads(capsys.readouterr().out) == {"cases": ["WNF3A16KV16"]}
    assert not (tmp_path / "methods.json").exists()


def test_rows_take_the_place_of_those_of_their_precisions(tmp_path):
    def row(precision, method, perplexity):
        return {"precision": precision, "method": method, "perplexity": perplexity}

    file = tmp_path / "methods.json"
    first = [row("W16A16KV16", "", 1), row("W8A8KV16", "rtn", 2)]
    assert methods.joined(file, first) == first
    kept = [row("W16A16KV16", "", 3), row("W4A16KV16", "rtn", 4), row("W8A8KV16", "gptq", 5)]
    file.write_text(json.dumps({"results": kept}))
    assert methods.joined(file, first) == [first[0], kept[1], first[1]]
