from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy
import pytest

import mpjax
from mpjax.bench import case_state, generate, measure
from mpjax.bench.random_model import random_model
from mpjax.decoding_state import STRIDE
from mpjax.kernels import KVFormat, device
from mpjax.models import Qwen3
from mpjax.models.presets import published
from mpjax.precision import Precision
from tests.mpjax.bench.rows import SMALL_MODEL, generate_row
from tests.sweeps import in_sweep


def sweep(precisions=("W4A16KV8",), batches=(1,), prompts=(6,), new=4, **changes):
    return generate.Sweep(precisions, batches, prompts, new, config=SMALL_MODEL, **changes)


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
        "context": "2048",
        "load": "7.1 s",
        "first token": "50.0 ms",
        "tokens/s": "1000",
        "step": "2000 µs",
        "kernels": "1900 µs",
        "roofline": "1000 µs",
        "of it": "50%",
        "peak memory": "10.9 GB",
        "check": "0.01 nats",
    }
    assert generate.cells(generate_row(devices=2))[0] == "W4A16KV8 on 2 devices"
    unread = generate_row(time_to_first_token_seconds=None, logprob_difference=None)
    empty = [
        name
        for name, cell in zip(generate.HEADERS, generate.cells(unread), strict=True)
        if not cell
    ]
    assert empty == ["load", "first token", "peak memory", "check"]


def test_decoding_that_disagrees_with_reading_fails():
    rows = [generate_row(logprob_difference=value) for value in (None, 0.99, 1.0, math.nan)]
    assert len(generate.failures(rows)) == 2
    assert "W4A16KV8, batch 2: log-prob" in generate.failures(rows)[0]
    two_bits = [generate_row(precision="W4A16KV2", logprob_difference=x) for x in (1.49, 1.5)]
    assert len(generate.failures(two_bits)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": ("W3",)}, "precision 'W3': W3A16 is not implemented"),
        ({"precisions": ("W16+W4A16KV8",)}, "random weights are all in one format, and compute in"),
        ({"precisions": ("W4A32KV8",)}, "random weights are all in one format, and compute in 16"),
        ({"precisions": ("W8A16KV8",), "from_disk": True}, "W8A16KV8: the checkpoint on disk"),
        ({"batches": (1, 0)}, "positive"),
        ({"new": 1}, "two new ones"),
        ({"speculate": (4, 0)}, "speculate: k is 0: expected a whole number from 1 to 32"),
        ({"prompts": (5, 0)}, "one prompt token"),
        ({"devices": (1, 4096)}, "devices is 4096, and JAX sees"),
        ({"piece_tokens": 4}, "prompts have 6 tokens, which pieces of 4 don't divide"),
    ],
)
def test_what_can_not_be_measured(arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep(**arguments)


def test_longer_contexts_get_positions():
    assert sweep(prompts=(252, 6)).model_config == SMALL_MODEL
    assert sweep(prompts=(253, 6)).model_config.max_position_embeddings == 257


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


def test_a_prompt_is_read_in_pieces(quick):
    [row] = generate.run(sweep(batches=(2,), piece_tokens=3))
    assert (row["piece_tokens"], row["batch"]) == (3, 2)
    assert row["logprob_difference"] < 0.2


@pytest.mark.parametrize(
    ("name", "precision", "width"),
    [
        in_sweep("qwen3-30b-a3b", "W4A16KV8", 128),
        ("gpt-oss-20b", "WMXFP4A16KV16", 96),
    ],
)
def test_a_mixture_reads_the_experts_that_are_hit(name, precision, width, quick):
    decoder, config = published(name)
    mlp = dataclasses.replace(
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
    generate._logprobs.clear_cache()
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
        assert generate._logprobs._cache_size() == 1


def test_steps_of_speculation_begin_behind_the_prompt(quick, monkeypatch):
    seen = []

    def costs(model, tokens, limits, k, act):
        act(lambda state: seen.append((tokens.shape, limits.room, state.cache.lengths)) or state)
        return {"k": k}

    monkeypatch.setattr(generate.speculation, "step_costs", costs)
    [row] = generate.run(sweep(speculate=(2, 3)))
    kernels = row["kernel_microseconds_per_step"]
    each = {name: time * generate.STRIDE for name, time in kernels.items()}
    assert row["speculation"] == [
        {"k": k, "kernel_microseconds_of_verifying": pytest.approx(each)} for k in (2, 3)
    ]
    assert [(shape, room, lengths.tolist()) for shape, room, lengths in seen] == [
        ((1, 6), 4, [6])
    ] * 2


def test_long_texts_are_not_checked(quick, monkeypatch):
    monkeypatch.setattr(generate, "CHECKED_TOKENS", 9)
    [row] = generate.run(sweep())
    assert row["logprob_difference"] is None
    assert row["time_to_first_token_seconds"] is not None


def test_precisions_batches_and_contexts_make_the_cases(monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 4e12)
    loaded = []

    def load(sweep, precision, devices):
        loaded.append(str(precision))
        return mpjax.LanguageModel(str(precision), None, precision.kv, Path()), 3.0

    monkeypatch.setattr(generate, "_load", load)
    left = ("precision", "batch", "load_seconds", "layers")

    def measured(lm, case):
        seen = (str(lm.kv_format), *case)
        return {key: value for key, value in generate_row(seen=seen).items() if key not in left}

    monkeypatch.setattr(generate, "_measure", measured)
    chosen = sweep(("W4A16KV8", "W4A16KV4", "A16KV4"), (1, 3), (6, 7))
    rows = list(generate.run(chosen))
    assert len(rows) == chosen.cases == 12
    assert loaded == ["W4A16KV8", "A16KV4"]  # once for neighbours of the same weights
    assert [(row["precision"], *row["seen"][1:3]) for row in rows] == list(
        itertools.product(chosen.precisions, chosen.batches, chosen.prompt_tokens)
    )
    assert all(row["seen"][0] in row["precision"] for row in rows)
    assert all(row["seen"][3:] == (4, True, None, ()) for row in rows)
    assert all(row["load_seconds"] == 3.0 for row in rows)
    assert rows[2]["decode_tokens_per_second"] == pytest.approx(1500.0)


def test_from_disk_times_the_load():
    lm, seconds = generate._load(sweep(from_disk=True), Precision.parse("A16KV8"))
    assert lm.precision == "W4A16KV8"
    assert seconds is not None
    assert seconds > 0
    lm, seconds = generate._load(sweep(), Precision.parse("W8A16KV4"))
    assert (lm.precision, seconds) == ("W8A16KV4", None)


def test_a_packed_head_is_read_and_the_embedding_is_not():
    plain, packed = (
        generate._load(sweep(), Precision.parse(text))[0] for text in ("W4A16KV8", "W4A16KV8H8")
    )
    assert packed.precision == "W4A16KV8H8"
    saved = plain.nbytes - packed.nbytes
    assert saved > 0.4 * plain.summary()["tables"]["head"]["bytes"]
    caches = [lm.model.create_cache(1, 8, "KV8") for lm in (plain, packed)]
    bytes = [generate.step_bytes(*it, 4) for it in zip((plain, packed), caches, strict=True)]
    assert bytes[0] - bytes[1] == saved


@pytest.mark.parametrize(("statistics", "peak"), [(None, None), ({"peak_bytes_in_use": 7}, 7)])
def test_the_peak_is_the_allocators(monkeypatch, statistics, peak):
    gpu = SimpleNamespace(memory_stats=lambda: statistics)
    monkeypatch.setattr(device, "default_device", lambda: gpu)
    assert generate._peak_bytes() == peak


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
    states = [case_state.empty_state(lm, 2, 130, 4) for lm in (expected, found)]
    filled = [case_state.fill(state, 130, m) for state, m in zip(states, (None, mesh), strict=True)]
    one, other = (state.cache for state in filled)
    numpy.testing.assert_array_equal(one.layers[0].keys, other.layers[0].keys)
    assert generate.step_bytes(found, other, 100) == generate.step_bytes(expected, one, 100)


def test_the_cache_that_fits_is_what_the_fullest_device_has_room_for(monkeypatch):
    lm = mpjax.LanguageModel(random_model(Qwen3, SMALL_MODEL, None), None, KVFormat(16), Path())
    page = 2 * 128 * 64 * 2  # keys and values of one head in bfloat16
    monkeypatch.setattr(generate, "free_bytes_on", lambda mesh: 10 * page + 1)
    assert generate._fitting_tokens(lm) == 1280
    monkeypatch.setattr(generate, "free_bytes_on", lambda mesh: None)
    assert generate._fitting_tokens(lm) is None
