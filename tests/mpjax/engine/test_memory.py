from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from mpjax.engine import memory
from mpjax.engine.state import page_bytes, residual_bytes
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import ExpertsSpec, LayerSpec


@pytest.fixture(scope="module")
def lm(tiny):
    return dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)


def pages(lm, given, slots=2, tokens=100):
    return memory.count_pages(lm, slots, tokens, given, 64)


def test_bytes_and_shares_and_what_is_useful(lm, monkeypatch):
    fixed, each = residual_bytes(lm, 2) + 2 * lm.config.vocab_size, page_bytes(lm)
    assert pages(lm, fixed + 3 * each + each // 2) == 1 + 3
    assert pages(lm, 10**9) == pages(lm, None) == 1 + 8
    working = memory._working_bytes(lm, 2, 64)
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
    """Of the widest layer: float32 [experts of a token, chunk, hidden], beside inner channels."""
    config, inner = lm.config, lm.config.intermediate_size
    before = memory._working_bytes(lm, 2, 64)
    experts = LayerSpec(config.layers[0].attention, ExpertsSpec(inner, experts_per_token=3))
    mixed = dataclasses.replace(config, layers=(*config.layers[1:], experts))
    other = SimpleNamespace(config=mixed)
    further = 64 * (2 * 3 * inner * 4 + 3 * config.hidden_size * 4)
    further += 8 * 256 * (2 * config.hidden_size + inner) * 4  # rows of tiles without a token
    assert memory._working_bytes(other, 2, 64) == before + further
