from __future__ import annotations

import json

import numpy as np

import mpjax
from benchmarks import methods, online_rotation
from benchmarks.online_rotation import TurnedMLP, with_turns
from tests.models.small import CONFIG, small_model


def test_a_model_with_turns_computes_what_it_computed(rng):
    model = small_model()
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 7))
    turned = with_turns(model)
    assert all(isinstance(layer.mlp, TurnedMLP) for layer in turned.layers)
    assert not isinstance(model.layers[0].mlp, TurnedMLP)
    np.testing.assert_allclose(turned(tokens), model(tokens), rtol=1e-3, atol=1e-3)
    before, after = (
        np.asarray(each.layers[0].mlp.inputs(np.eye(64, dtype=np.float32)[None])["down"])
        for each in (model, turned)
    )
    np.testing.assert_allclose(
        np.linalg.norm(after, axis=-1), np.linalg.norm(before, axis=-1), rtol=1e-4
    )
    assert abs(after - before).max() > 0.5 * abs(before).max()


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
