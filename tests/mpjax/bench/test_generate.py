from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import jax
import numpy
import pytest

import mpjax
from mpjax.bench import case_state, generate, measure
from mpjax.bench.random_model import random_model
from mpjax.generation.loop import STRIDE
from mpjax.kernels import KVFormat
from mpjax.models import Qwen3
from mpjax.models.presets import published
from tests.mpjax.bench.rows import SMALL_MODEL, generate_row
from tests.sweeps import in_sweep


def sweep(precisions=("W4A16KV8",), batches=(1,), prompts=(6,), new=4, **changes):
    return generate.Sweep(precisions, batches, prompts, new, config=SMALL_MODEL, **changes)


def test_decoding_that_disagrees_with_reading_fails():
    rows = [generate_row(logprob_difference=value) for value in (None, 0.99, 1.0, math.nan)]
    assert len(generate.failures(rows)) == 2
    assert "W4A16KV8, batch 2: log-prob" in generate.failures(rows)[0]
    two_bits = [generate_row(precision="W4A16KV2", logprob_difference=x) for x in (1.49, 1.5)]
    assert len(generate.failures(two_bits)) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_weights_and_a_part_of_the_cache(tied):
    config = dataclasses.replace(SMALL_MODEL, tie_word_embeddings=tied)
    lm = mpjax.LanguageModel(random_model(Qwen3, config, None), None, KVFormat(8), Path())
    cache = lm.model.create_cache(2, 200, KVFormat(8))
    table = 2 * 96 * 128
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.model))
    assert weights == lm.nbytes
    pages = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    expected = weights - (0 if tied else table) + pages * 100 / 256
    assert generate.step_bytes(lm, cache, 100) == pytest.approx(expected)


@pytest.fixture
def quick(take, monkeypatch):
    """A bandwidth of 1 TB/s, 48 µs of kernels in every call, and peaks of 10, 20, … bytes."""
    take(matmul__1=16.0, MemcpyD2D=500.0, other=32.0)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e12)
    peaks = itertools.count(10, 10)
    monkeypatch.setattr(generate, "_peak_bytes", lambda: next(peaks))


def test_a_case_is_measured_and_checked(quick):
    [row] = generate.run(sweep())
    assert row["speculation"] == []
    assert generate.failures([row]) == []
    assert row["peak_bytes"] == 20
    assert row["layers"] == 1
    assert (row["prompt_tokens"], row["new_tokens"], row["filled"]) == (6, 4, False)
    # One stride was profiled; a copy is no part of a step.
    steps = row["kernel_microseconds_per_step"]
    assert list(steps.items()) == [("other", 32 / STRIDE), ("matmul__1", 16 / STRIDE)]
    assert row["sum_of_kernels_microseconds"] == pytest.approx(48 / STRIDE)
    assert row["load_seconds"] is None
    assert row["roofline_microseconds"] == pytest.approx(row["step_bytes"] / 1e6)
    assert 0 < row["decode_step_microseconds"] < 1e7
    assert 0 < row["time_to_first_token_seconds"] < row["prefill_seconds_with_compilation"]
    assert row["logprob_difference"] < 0.2
    assert row == generate.figures(row)


@pytest.mark.parametrize(
    ("name", "precision", "width"),
    [
        in_sweep("qwen3-30b-a3b", "W4A16KV8", 128),
        ("gpt-oss-20b", "WMXFP4A16KV16", 96),
    ],
)
def test_a_mixture_reads_the_experts_that_are_hit(name, precision, width, quick):
    decoder, config = published(name)
    mlp = dataclasses.replace(  # type: ignore[call-arg]
        config.layers[0].mlp, intermediate_size=width, num_experts=8, experts_per_token=2
    )
    small = dataclasses.replace(
        config,
        vocab_size=96,
        hidden_size=3 * width,
        num_heads=2,
        num_kv_heads=1,
        layers=(dataclasses.replace(config.layers[0], mlp=mlp),),
        stop_ids=(),
    )
    chosen = dataclasses.replace(sweep((precision,)), config=small, decoder=decoder)
    [row] = generate.run(chosen)
    assert generate.failures([row]) == []
    assert row["roofline_microseconds"] == pytest.approx(row["step_bytes"] / 1e6)
    assert row["step_bytes"] < 0.6 * row["weights_bytes"]  # a quarter of the experts


@pytest.mark.parametrize("precisions", [("W4A16KV8",), in_sweep(("W4A16KV8", "W4A16KV4"))])
def test_only_the_first_case_of_a_filled_sweep_reads_and_is_checked(precisions, quick, monkeypatch):
    monkeypatch.setattr(generate, "CHECKED_TOKENS", 10)
    generate._logprobs.clear_cache()  # type: ignore[attr-defined]
    chosen = sweep(precisions, prompts=(6, 140), filled=True)
    rows, count = list(generate.run(chosen)), len(precisions)
    assert len(rows) == chosen.cases == 2 * count
    assert [row["filled"] for row in rows] == [False, True] * count
    assert [row["prompt_tokens"] for row in rows] == [6, 140] * count
    for key in ("time_to_first_token_seconds", "logprob_difference", "sum_of_kernels_microseconds"):
        assert [row[key] is None for row in rows] == [False, True] * count
    assert generate.failures(rows) == []
    assert rows[1]["cache_bytes"] > rows[0]["cache_bytes"]
    if count > 1:  # the same weights, whatever the cache's format
        assert generate._logprobs._cache_size() == 1  # type: ignore[attr-defined]


def test_rows_with_adapters_are_compared_with_a_model_without(quick):
    plain, none, two = generate.run(sweep(batches=(3,), adapters=(0, 2), rank=4))
    assert [row.get("adapters") for row in (plain, none, two)] == [None, 0, 2]
    for row in (none, two):
        ratio = plain["decode_step_microseconds"] / row["decode_step_microseconds"]
        assert row["of_step"] == pytest.approx(ratio)
        assert row["of_prompt"] > 0
        assert row["logprob_difference"] < 0.2
    assert none["step_bytes"] == plain["step_bytes"]
    pairs = 4 * (4 * 128 + 4 * 64 + 128 + 128 + 4 * 128 + 128)  # both factors of all seven maps
    assert two["step_bytes"] - plain["step_bytes"] == pytest.approx(2 * 2 * pairs)
    with pytest.raises(ValueError, match="on one device"):
        sweep(adapters=(-1,))


def test_wrong_scores_are_seen():
    lm = mpjax.LanguageModel(random_model(Qwen3, SMALL_MODEL, None), None, KVFormat(), Path())
    text = jax.numpy.arange(8)[None]
    logits = jax.jit(lambda model, text: model(text))(lm.model, text)
    right = jax.nn.log_softmax(logits)[:, jax.numpy.arange(4, 7), text[0, 5:]]
    assert generate._difference(lm, text, right) < 0.01
    assert generate._difference(lm, text, right - 2.0) == pytest.approx(2.0, abs=0.01)


def test_each_device_reads_its_weights_and_its_cache():
    """Of one device that is divided as several are, all; the pages are filled like any."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    whole = random_model(Qwen3, SMALL_MODEL, None)
    divided = random_model(Qwen3, SMALL_MODEL, None, mesh=mesh)
    expected, found = (
        mpjax.LanguageModel(model, None, KVFormat(8), Path()) for model in (whole, divided)
    )
    loops = [
        case_state.empty_loop(lm, case_state.endless(2, 4), 130, 4) for lm in (expected, found)
    ]
    filled = [case_state.fill(loop, 130, m) for loop, m in zip(loops, (None, mesh), strict=True)]
    one, other = (loop.state.cache for loop in filled)
    numpy.testing.assert_array_equal(one.layers[0].keys, other.layers[0].keys)
    assert generate.step_bytes(found, other, 100) == generate.step_bytes(expected, one, 100)
