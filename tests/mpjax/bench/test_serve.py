from __future__ import annotations

import json

import pytest
from flax import nnx

import mpjax
from mpjax.bench import serve, tables
from mpjax.bench.lengths import Lengths
from mpjax.models import Qwen3
from mpjax.precision import Precision
from tests.mpjax.bench.rows import SMALL_MODEL, serve_row


def load(**changes):
    return serve.Load(6, Lengths(8, 20), Lengths(3, 9), **changes)


def test_an_engine_and_static_batches_do_the_same(tmp_path):
    sweep = serve.Sweep(
        ("W16A16KV16",),
        load(rate=400.0, shared=4, late=40),
        slots=4,
        chunk_tokens=16,
        steps=4,
        static=4,
        config=SMALL_MODEL,
        trace=tmp_path / "trace.json",
    )
    engine, static = rows = list(serve.run(sweep))
    assert len(rows) == sweep.cases
    assert engine["new_tokens"] == engine["asked_tokens"] == static["new_tokens"] + 8
    assert static["through"] == "batches of 4"
    assert serve.failures(rows) == []
    for row in rows:
        assert row["seconds"] > 0
        assert row["first_token_seconds"]["p50"] <= row["first_token_seconds"]["p99"]
    assert engine["late_steps"] <= engine["steps"]
    assert 0 <= engine["idle_share"] < 1
    assert all(len(line) == len(serve.COLUMNS) for line in tables.table(serve.COLUMNS, rows)[1])
    programs = json.loads(sweep.trace.read_text())["traceEvents"]
    read = sum(program["args"]["tokens"] for program in programs)
    assert read == engine["prompt_tokens"] - engine["shared_tokens"]
    assert programs[0]["ts"] == 0 < programs[-1]["ts"] < engine["seconds"] * 1e6


def test_a_loaded_model_is_measured_in_its_own_precision(tmp_path):
    kv = Precision.parse("W16A16KV8").kv
    lm = mpjax.LanguageModel(Qwen3(SMALL_MODEL, nnx.Rngs(0)), None, kv, tmp_path)
    mpjax.save(lm, tmp_path / "model")
    [row] = serve.run(serve.Sweep(("",), load(), slots=4, static=0, model=str(tmp_path / "model")))
    assert row["precision"] == lm.precision
    assert row["new_tokens"] == row["asked_tokens"]


def test_figures_under_the_keys_of_vllm():
    found = serve.vllm_keys(serve_row(gap_seconds=None))
    assert found["total_token_throughput"] == 750.0
    assert found["median_ttft_ms"] == pytest.approx(200.0)
    assert found["p99_tpot_ms"] == pytest.approx(20.0)
    assert found["mean_itl_ms"] is None
    heads, lines = serve.vllm_table([serve_row()])
    assert heads == ["key", "W4A16KV8, engine"]
    assert ["output_throughput", "250.00"] in lines


def test_gaps_count_from_when_the_late_prompt_comes():
    traces = [serve._Trace(0.0, [1.0, 3.0, 3.5, 4.5], [1, 1, 1, 1]), serve._Trace(3.2, [4.0], [1])]
    assert serve._figures(traces, 5.0)["gap_seconds"]["most"] == 2.0
    assert serve._figures(traces, 5.0, since=3.2)["gap_seconds"]["most"] == 1.0


def test_what_is_drawn_is_the_same_each_time():
    found = load(rate=10.0, shared=5)
    assert found.sizes() == found.sizes()
    prompts = found.prompts(100, 1)
    assert prompts == found.prompts(100, 1) != found.prompts(100, 2)
    assert [len(prompt) for prompt in prompts] == [tokens for tokens, _ in found.sizes()]
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert found.arrivals() == sorted(found.arrivals())
    assert load().arrivals() == [0.0] * 6
    assert load(pairs=((3, 4), (5, 6))).sizes()[:3] == [(3, 4), (5, 6), (3, 4)]
    assert load(late=99).most == 107


def test_failures_are_sentences():
    wrong = serve_row(programs=19, new_tokens=499, lost_pages=2)
    assert serve.failures([serve_row(), wrong]) == [
        "W4A16KV8: 19 programs were compiled, above 18",
        "W4A16KV8: 2 pages of the cache were lost",
        "W4A16KV8: 499 tokens were generated, and 500 asked for",
    ]
