from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from mpjax.engine import memory
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import page_bytes, residual_bytes
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import ExpertsSpec, LayerSpec


@pytest.fixture(scope="module")
def lm(tiny):
    return dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)


SIZES = Sizes(2, 0, 32, chunk=64, sequences=2)


def pages(lm, given, slots=2, tokens=100):
    return memory.count_pages(lm, dataclasses.replace(SIZES, slots=slots), tokens, given)


def test_bytes_and_shares_and_what_is_useful(lm, monkeypatch):
    fixed, each = residual_bytes(lm, 2) + 2 * lm.config.vocab_size, page_bytes(lm)
    assert pages(lm, fixed + 3 * each + each // 2) == 1 + 3
    assert pages(lm, 10**9) == pages(lm, None) == 1 + 8
    working = memory._working_bytes(lm, SIZES)
    monkeypatch.setattr(memory, "free_bytes_on", lambda mesh: working + 2 * (fixed + 4 * each))
    assert pages(lm, 0.5) == 1 + 4
    assert pages(lm, 1) == 1 + 8
    monkeypatch.setattr(memory, "free_bytes_on", lambda mesh: 1000)
    with pytest.raises(ValueError, match="too little memory is free: a page of 32 tokens takes"):
        pages(lm, None)
    monkeypatch.setattr(memory, "free_bytes_on", lambda mesh: None)
    assert pages(lm, 0.5, slots=1) > 1


@pytest.mark.parametrize("given", [0, -1, True, "8GB", 10.0, float("nan"), float("inf")])
def test_what_is_no_memory_is_refused(lm, given):
    with pytest.raises(ValueError, match="cache_memory is"):
        pages(lm, given)


def test_more_than_is_free_is_refused(lm, monkeypatch):
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device=None: 1000)
    with pytest.raises(DeviceMemoryError, match="the engine's cache needs"):
        pages(lm, 10**8)


def test_room_is_left_for_the_terms_of_experts(lm):
    """Of the widest layer."""
    config = lm.config
    before = memory._working_bytes(lm, SIZES)
    experts = ExpertsSpec(config.intermediate_size, experts_per_token=3)
    layer = LayerSpec(config.layers[0].attention, experts)
    mixed = dataclasses.replace(config, layers=(*config.layers[1:], layer))
    other = SimpleNamespace(config=mixed)
    found = memory._working_bytes(other, SIZES) - before
    inside = (spec.working_bytes(config, 64) for spec in (experts, config.layers[0].mlp))
    assert found == next(inside) - next(inside) > 0


def test_room_is_left_for_rows_that_ride_along(lm):
    """Beside a chunk: their activations, and the logits that they draw from."""
    config, sizes = lm.config, dataclasses.replace(SIZES, slots=100, sequences=32)
    apart, riding = (
        memory._working_bytes(lm, dataclasses.replace(sizes, rides=rides))
        for rides in (False, True)
    )
    activations = 3 * (config.intermediate_size + config.hidden_size) * 4
    assert riding - apart == 64 * activations + 32 * 12 * config.vocab_size
    proposed = dataclasses.replace(sizes, proposed=4)
    logits = 400 * 12 * config.vocab_size
    assert memory._working_bytes(lm, proposed) - apart == 400 * activations + logits
    wide = dataclasses.replace(sizes, chunk=200)
    assert memory._working_bytes(lm, wide) - apart == 100 * activations
