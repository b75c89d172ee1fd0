from __future__ import annotations

import json

import numpy as np
import pytest

import mpjax
from benchmarks.peers import checkpoints, loads, run_mpjax
from mpjax.bench.lengths import Lengths
from mpjax.bench.serve import Load

SMALL = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1200, "eos_token_id": 2},
}
# What a small model has instead, by the name of the published one.
OF_MODEL = {
    "qwen3-8b": SMALL | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64},
    "gpt-oss-20b": SMALL
    | {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3-8b", "W4A16KV16"), ("gpt-oss-20b", "W16+WMXFP4A16KV16")]
)
def test_a_checkpoint_is_written(name, precision, tmp_path):
    config = json.loads((checkpoints.CONFIGS / f"{name}.json").read_text())
    assert OF_MODEL[name].keys() <= config.keys()
    folder = checkpoints.write(tmp_path, name, config | OF_MODEL[name])
    assert mpjax.load(folder, precision="A16KV16", progress=False).precision == precision


def test_an_engine_of_mpjax_is_measured(tmp_path, monkeypatch, capsys):
    load = loads._requests(lambda: [(30, 2), (20, 5)])
    monkeypatch.setattr(loads, "LOADS", {"small": load})
    monkeypatch.setattr(loads, "MOST_TOKENS", 512)
    monkeypatch.setattr(loads, "WARM_UP", ((1, 4),))
    monkeypatch.setattr(mpjax.Engine, "compile", lambda engine: None)  # what is not run
    output = tmp_path / "out.json"
    arguments = ["run", str(mpjax.bundled_model()), str(output), "--slots", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    loads.main("", run_mpjax.options, run_mpjax.start)
    found = json.loads(output.read_text())
    assert (found["engine"], found["weights"]) == ("mpjax", "W16A16KV16")
    [row] = found["results"]
    assert row["load"] == "small"
    assert row["tokens_per_second"] == pytest.approx(7 / row["seconds"])


def test_uneven_lengths_are_those_of_the_benchmark_of_serving():
    lengths = map(Lengths.parse, ("lognormal:1024:0.8:4096", "lognormal:512:0.8:4096"))
    assert loads.uneven() == Load(512, *lengths).sizes()


def test_decoding_is_timed_without_its_prompts(monkeypatch):
    clock = [0.0]

    def generate(prompts, new_tokens):
        clock[0] += 7.0 + 0.5 * max(new_tokens)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    [steps, _, at_once, _] = loads.run(generate, 2000, [*loads.LOADS])
    assert np.isclose(steps["tokens_per_second"], 2.0)
    assert steps["first_tokens_seconds"] == 7.5
    assert np.isclose(at_once["tokens_per_second"], 256 * 512 / (7 + 0.5 * 512))
