from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import mpjax
from models import Qwen3
from mpjax.bench import generate, measure
from mpjax.bench.random_model import random_model
from mpjax.precision import Precision
from pallas_kernels import KVFormat
from tests.mpjax.bench.rows import SMALL_MODEL, generate_row


def sweep(precisions=("W4A16KV8",), batches=(1,), prompt=6, new=4, **changes):
    return generate.Sweep(precisions, batches, prompt, new, config=SMALL_MODEL, **changes)


def test_figures_follow_from_times():
    row = generate.figures(generate_row())
    assert row["decode_tokens_per_second"] == pytest.approx(1000.0)
    assert row["roofline_microseconds"] == pytest.approx(1000.0)
    assert row["roofline_tokens_per_second"] == pytest.approx(2000.0)
    assert row["roofline_share"] == pytest.approx(0.5)
    assert generate.figures(row) == row


def test_cells_are_in_the_order_of_the_headers():
    row = generate_row(load_seconds=7.13, peak_bytes=10_919_033_600)
    assert dict(zip(generate.HEADERS, generate.cells(row), strict=True)) == {
        "precision": "W4A16KV8",
        "batch": "2",
        "load": "7.1 s",
        "first token": "50.0 ms",
        "tokens/s": "1000",
        "step": "2000 µs",
        "sum of its kernels": "1900 µs",
        "memory roofline": "1000 µs",
        "of it": "50%",
        "peak memory": "10.9 GB",
    }
    assert generate.cells(generate_row())[2::7] == ["", ""]


def test_decoding_that_disagrees_with_reading_fails():
    rows = [generate_row(logprob_difference=value) for value in (0.99, 1.0, math.nan)]
    assert len(generate.failures(rows)) == 2
    assert "W4A16KV8, batch 2: log-prob" in generate.failures(rows)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": ("W3",)}, "can't read the precision 'W3'"),
        ({"precisions": ("W8A16KV8",), "from_disk": True}, "W8A16KV8: the checkpoint on disk"),
        ({"batches": (1, 0)}, "positive"),
        ({"new": 1}, "two new ones"),
        ({"prompt": 250, "new": 7}, "256 positions"),
    ],
)
def test_what_can_not_be_measured(arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep(**arguments)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_weights_and_a_part_of_the_cache(tied):
    config = dataclasses.replace(SMALL_MODEL, tie_word_embeddings=tied)
    lm = mpjax.LanguageModel(random_model(Qwen3, config, None), None, KVFormat(8), Path())
    cache = lm.model.create_cache(2, 200, KVFormat(8))
    table = 2 * 96 * 128
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.model))
    assert weights == lm.nbytes
    expected = weights - (0 if tied else table) + cache.nbytes * 100 / 256
    assert generate.step_bytes(lm, cache, 100) == pytest.approx(expected)


def test_a_case_is_measured_and_checked(take, monkeypatch):
    take(matmul__1=16.0, MemcpyD2D=500.0, other=32.0)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e12)
    peaks = iter([10, 20])
    monkeypatch.setattr(generate, "_peak_bytes", lambda: next(peaks))
    rows = list(generate.run(sweep()))
    assert [row["peak_bytes"] for row in rows] == [20]
    assert generate.failures(rows) == []
    for row in rows:
        assert row["layers"] == 1
        assert (row["prompt_tokens"], row["new_tokens"]) == (6, 4)
        # Three steps were profiled; a copy of the cache is no part of a step.
        steps = row["kernel_microseconds_per_step"]
        assert list(steps.items()) == [("other", 32 / 3), ("matmul__1", 16 / 3)]
        assert row["sum_of_kernels_microseconds"] == pytest.approx(16.0)
        assert next(iter(row["prefill_kernel_microseconds"])) == "MemcpyD2D"
        assert row["load_seconds"] is None
        assert row["roofline_microseconds"] == pytest.approx(row["step_bytes"] / 1e6)
        assert 0 < row["decode_step_microseconds"] < 1e7
        assert row["logprob_difference"] < 0.2
        assert row == generate.figures(row)


def test_precisions_and_batches_make_the_cases(monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 4e12)
    monkeypatch.setattr(generate, "_load", lambda sweep, precision: (str(precision), 3.0))
    left = ("precision", "batch", "load_seconds", "layers")
    monkeypatch.setattr(
        generate,
        "_measure",
        lambda lm, batch, prompt, new: {
            key: value for key, value in generate_row(lm=lm).items() if key not in left
        },
    )
    chosen = sweep(("W4A16KV8", "A16KV4"), (1, 3))
    rows = list(generate.run(chosen))
    assert len(rows) == chosen.cases == 4
    assert [(row["lm"], row["precision"], row["batch"]) for row in rows] == [
        *(("W4A16KV8", "W4A16KV8", 1), ("W4A16KV8", "W4A16KV8", 3)),
        *(("A16KV4", "A16KV4", 1), ("A16KV4", "A16KV4", 3)),
    ]
    assert all(row["load_seconds"] == 3.0 for row in rows)
    assert rows[1]["decode_tokens_per_second"] == pytest.approx(1500.0)


def test_from_disk_times_the_load():
    lm, seconds = generate._load(sweep(from_disk=True), Precision.parse("A16KV8"))
    assert lm.precision == "W4A16KV8"
    assert seconds is not None
    assert seconds > 0
    lm, seconds = generate._load(sweep(), Precision.parse("W8A16KV4"))
    assert (lm.precision, seconds) == ("W8A16KV4", None)


@pytest.mark.parametrize(("statistics", "peak"), [(None, None), ({"peak_bytes_in_use": 7}, 7)])
def test_the_peak_is_the_allocators(monkeypatch, statistics, peak):
    device = SimpleNamespace(memory_stats=lambda: statistics)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert generate._peak_bytes() == peak


def test_wrong_scores_are_seen():
    lm = mpjax.LanguageModel(random_model(Qwen3, SMALL_MODEL, None), None, KVFormat(), Path())
    text = jax.numpy.arange(8)[None]
    logits = jax.jit(lambda model, text: model(text))(lm.model, text)
    right = jax.nn.log_softmax(logits)[:, jax.numpy.arange(4, 7), text[0, 5:]]
    assert generate._difference(lm, text, right) < 0.01
    assert generate._difference(lm, text, right - 2.0) == pytest.approx(2.0, abs=0.01)
