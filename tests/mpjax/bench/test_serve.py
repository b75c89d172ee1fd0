from __future__ import annotations

import dataclasses
import json

import pytest

import mpjax
from mpjax.bench import serve
from mpjax.bench.lengths import Lengths
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
    assert len(serve.cells(engine)) == len(serve.cells(static)) == len(serve.HEADERS)
    programs = json.loads(sweep.trace.read_text())["traceEvents"]
    read = sum(program["args"]["tokens"] for program in programs)
    assert read == engine["prompt_tokens"] - engine["shared_tokens"]
    assert programs[0]["ts"] == 0 < programs[-1]["ts"] < engine["seconds"] * 1e6


def test_static_batches_may_run_alone(monkeypatch):
    made = []
    monkeypatch.setattr(serve, "_random_lm", lambda *what: made.append(what))
    monkeypatch.setattr(serve, "_static", lambda lm, sweep: {"through": "batches of 2"})
    sweep = serve.Sweep(("W16A16KV16",), load(), static=2, engine=False, config=SMALL_MODEL)
    assert [row["through"] for row in serve.run(sweep)] == ["batches of 2"]
    assert sweep.cases == len(made) == 1


def test_a_sweep_is_a_command():
    lengths = Lengths(1, 512, 64.0, 0.8), Lengths(2, 2)
    assert serve.Sweep(("W4A16KV8", "W8A8KV8"), serve.Load(9, *lengths)).command == (
        "mpjax bench serve --precision W4A16KV8,W8A8KV8 --requests 9 "
        "--prompt-tokens lognormal:64:0.8:512 --new-tokens 2"
    )
    special = serve.Load(9, *lengths, ((1, 2),), rate=2.5, shared=3, late=99)
    options = {"max_gap": float("inf"), "ride": True, "engine": False, "share_prefixes": False}
    options |= {"speculate": mpjax.Ngram(k=4, n=3), "static": 2}
    assert serve.Sweep(("W4A16KV8",), special, **options).command == (
        "mpjax bench serve --precision W4A16KV8 --requests 9 --lengths FILE.jsonl --rate 2.5 "
        "--shared-tokens 3 --late-prompt 99 --max-gap inf --static 2 --ride "
        "--no-engine --speculate ngram:4:3 --no-share"
    )
    found = [
        serve.describe(dataclasses.asdict(load)) for load in (special, serve.Load(9, *lengths))
    ]
    assert found == [
        "lengths of a file, 2.5/s, 3 shared, 99 late",
        "lognormal:64:0.8:512 + 2",
    ]


def test_gaps_count_from_when_the_late_prompt_comes():
    traces = [serve._Trace(0.0, [1.0, 3.0, 3.5, 4.5], [1, 1, 1, 1]), serve._Trace(3.2, [4.0], [1])]
    assert serve._figures(traces, 5.0)["gap_seconds"]["most"] == 2.0
    assert serve._figures(traces, 5.0, since=3.2)["gap_seconds"]["most"] == 1.0


def test_cells_name_several_devices():
    assert serve.cells(serve_row(devices=2))[0] == "W4A16KV8 on 2 devices"


def test_cells_are_in_the_order_of_the_headers():
    row = serve_row()
    assert dict(zip(serve.HEADERS, serve.cells(row), strict=True)) == {
        "precision": "W4A16KV8",
        "through": "engine",
        "requests": "10",
        "seconds": "2.00 s",
        "requests/s": "5.00",
        "tokens/s": "250",
        "first token": "0.20 / 0.50 s",
        "token": "10.0 / 20.0 ms",
        "longest gap": "100 ms",
        "shared": "25%",
        "preempted": "3",
        "idle": "2.5%",
    }
    short = serve_row(token_seconds=None, gap_seconds=None, shared_tokens=0, preemptions=0)
    assert serve.cells(short)[7:-1] == [""] * 4
    batches = serve_row(through="batches")
    del batches["idle_share"]
    assert serve.cells(batches)[-1] == ""
    counts = {"proposed_tokens": 40, "accepted_tokens": 30}
    speculated = serve_row(speculate="Ngram(k=4, n=3)", **counts)
    assert serve.cells(speculated)[1] == "engine, 75% of 40 proposed"


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
    wrong = serve_row(programs=16, new_tokens=499, lost_pages=2)
    assert serve.failures([serve_row(), wrong]) == [
        "W4A16KV8: 16 programs were compiled, above 15",
        "W4A16KV8: 2 pages of the cache were lost",
        "W4A16KV8: 499 tokens were generated, and 500 asked for",
    ]


@pytest.mark.parametrize("text", ["W4A32KV8", "W4A16KV8s"])
def test_random_weights_have_one_format(text):
    with pytest.raises(ValueError, match="random weights are all in one format"):
        serve.Sweep((text,), load())
    with pytest.raises(ValueError, match="devices is 4096, and JAX sees"):
        serve.Sweep(("W4A16KV8",), load(), devices=4096)
