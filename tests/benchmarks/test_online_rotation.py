from __future__ import annotations

import json

import mpjax
from benchmarks import methods, online_rotation


def test_rows_with_and_without(tmp_path, monkeypatch):
    text, held_out = methods.python_source()
    short = [document[:1500] for document in text[:2]], [held_out[0][:1500]]
    little = mpjax.Calibration(window=64, tokens=512, batch=4)
    monkeypatch.setattr(online_rotation, "RESULTS", tmp_path)
    monkeypatch.setattr(online_rotation, "CASES", {"W8A8KV16": ("range",)})
    monkeypatch.setattr(online_rotation, "python_source", lambda: short)
    monkeypatch.setattr(online_rotation.run, "__defaults__", (little,))
    online_rotation.main([])
    rows = json.loads((tmp_path / "online-rotation.json").read_text())["results"]
    assert [row.get("online") for row in rows] == [None, False, True]
    assert all(abs(row["rise"]) < 0.1 for row in rows)
    names = [online_rotation.cells(row)[1] for row in rows]
    assert names == ["", "range", "range with R4"]
