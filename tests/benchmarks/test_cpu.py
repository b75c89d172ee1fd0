from __future__ import annotations

import json

import pytest

from benchmarks import cpu
from mpjax.bench import measure

pytestmark = pytest.mark.any_version


def test_systems_take_turns_and_the_result_says_how_it_was_measured(tmp_path, monkeypatch):
    calls = []

    def make(name):
        def generate(batch, tokens):
            calls.append((name, batch))
            return batch * tokens

        return lambda path, threads: generate

    for function, name in (("load_mpjax", "mpjax"), ("load_transformers", "transformers")):
        monkeypatch.setattr(cpu, function, make(name))
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)  # without llama.cpp
    output = tmp_path / "cpu.json"
    monkeypatch.setattr("sys.argv", ["cpu.py", "model.gguf", "--rounds", "1"])
    monkeypatch.setattr(measure, "stamp", measure.stamp.__wrapped__)  # which keeps its first result
    cpu.main(["model.gguf", "--rounds", "1", "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["command"].endswith("model.gguf --rounds 1")
    assert found["device"]
    turns = ["mpjax", "transformers"] * 2
    assert calls == [(name, batch) for batch in (1, 8) for name in turns]
    seconds = found["systems"]["transformers"]["batches"]["8"]
    assert 0 < seconds["least_seconds"] <= seconds["median_seconds"]
