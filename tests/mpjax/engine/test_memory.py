from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from mpjax.constraints.automaton import SMALL_CLASSES
from mpjax.engine import memory
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import cache_bytes
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import ExpertsSpec, LayerSpec
from mpjax.models.latent import EXPANDED_BYTES, LatentSpec
from mpjax.models.registry import read_config
from tests.models.sharded_families import keys


@pytest.fixture(scope="module")
def lm(tiny):
    return dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)


SIZES = Sizes(2, (), 32, chunk=64, sequences=2, table_states=8)


def pages(lm, given, slots=2, tokens=100):
    sizes = memory.count_pages(lm, dataclasses.replace(SIZES, slots=slots), tokens, given)
    [found] = sizes.pages
    return found


def test_bytes_and_shares_and_what_is_useful(lm, monkeypatch):
    [each], fixed = cache_bytes(lm, 2)
    fixed += 2 * (memory.CONTROL * lm.config.vocab_size + 2 * 8 * SMALL_CLASSES)
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


def test_room_is_left_for_the_keys_and_values_of_cached_latents(lm):
    """Twice, from the number of tokens on for which latents are expanded."""
    config = dataclasses.replace(lm.config, max_position_embeddings=2**15)
    spec = LatentSpec(keys=64, rotary=64, values=128)
    of_token = 2 * config.num_heads * 128 * 4
    few, many = (spec.working_bytes(config, tokens) for tokens in (127, 128))
    assert many - few == 2 * of_token + 2 * EXPANDED_BYTES
    short = dataclasses.replace(config, max_position_embeddings=256)
    assert spec.working_bytes(short, 128) == 2 * 128 * of_token + 2 * 128 * 256 * of_token


def test_room_is_left_for_what_is_proposed_and_for_chunks(lm):
    """Activations, and the logits that are drawn from."""
    config, sizes = lm.config, dataclasses.replace(SIZES, slots=100, sequences=32)
    plain = memory._working_bytes(lm, sizes)
    activations = 3 * (config.intermediate_size + config.hidden_size) * 4
    proposed = dataclasses.replace(sizes, proposed=4)
    logits = 400 * 12 * config.vocab_size
    assert memory._working_bytes(lm, proposed) - plain == 400 * activations + logits
    wide = dataclasses.replace(sizes, chunk=200)
    assert memory._working_bytes(lm, wide) - plain == 100 * activations


def test_a_call_that_scores_nothing_has_no_logits_of_prompts(lm):
    scored = dataclasses.replace(SIZES, chunk=4096, single=True)
    generated = dataclasses.replace(scored, scores=False)
    rows = max(SIZES.slots, SIZES.sequences)
    logits = (4096 - rows) * 12 * lm.config.vocab_size
    assert memory._working_bytes(lm, scored) - memory._working_bytes(lm, generated) == logits


@pytest.mark.parametrize(
    ("room", "expected"), [(10**6, [100, 20]), (500, [48, 20]), (299, [16, 16]), (10, [0, 0])]
)
def test_pages_of_a_window_come_first_and_the_others_take_the_rest(room, expected):
    """Of 5 and 13 bytes each."""
    assert memory._share_room(room, [5, 13], [100, 20]) == expected
    assert memory._share_room(room, [13, 5], [20, 100]) == expected[::-1]


def test_a_window_needs_pages_for_itself_and_for_what_is_read():
    sizes = Sizes(64, (), 128, windows=(None, 128), chunk=4096, sequences=32)
    assert memory.most_pages(sizes, 8192, None) == 64 * 64
    assert memory.most_pages(sizes, 8192, 128) == 64 * (3 + 2) + 2 * (32 + 32)
    assert memory.most_pages(sizes, 128, 128) == 64


@pytest.mark.parametrize("architecture", ["NemotronHForCausalLM", "Qwen3_5ForCausalLM"])
def test_mixers_with_a_state_count_what_their_first_map_gives(architecture):
    _, config = read_config(keys(architecture))
    spec = config.layers[0].attention
    outputs = sum(out for _, out in spec.linear_maps(config)[0].shapes)
    assert spec.working_bytes(config, 5) > 2 * 5 * outputs * 4
