"""The cost of a verifying step, on a small model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

import mpjax
from mpjax.bench import case_state, generate, speculation, tables
from mpjax.kernels import KVFormat
from mpjax.models import Qwen3
from mpjax.models.qwen_hybrid import Qwen35
from mpjax.precision import Precision
from tests.models.small import mtp_model
from tests.mpjax.bench.rows import SMALL_MODEL


@pytest.fixture(scope="module")
def lm():
    sweep = generate.Sweep(("W16A16KV8",), (1,), (6,), 4, config=SMALL_MODEL, decoder=Qwen3)
    return generate._load(sweep, Precision.parse("W16A16KV8"))[0]


def test_costs_are_measured_and_the_state_is_given_back(lm):
    loop, given = case_state.empty_loop(lm, case_state.endless(1, 4), 150, 4), []

    def act(function):
        nonlocal loop
        loop = function(case_state.rewind(loop, 6))
        given.append(loop.state.speculation)

    found = speculation.step_costs(lm.model, jnp.arange(6)[None], 2, act)
    assert found["k"] == 2
    assert 0 < found["proposing_step_microseconds"] < 1e7
    assert 0 < found["verifying_step_microseconds"] < 1e7
    assert given == [None] * 2 * speculation.ROUNDS
    assert loop.state.cache.lengths.tolist() == [9]


def test_a_step_with_the_models_head_is_measured_beside_one_without():
    """The head's layer is in the cache only meanwhile, and a sweep has a head for its families."""
    headed = mtp_model()
    lm = mpjax.LanguageModel(headed.without_drafts(), None, KVFormat(16), Path())
    loop = case_state.empty_loop(lm, case_state.endless(2, 4), 150, 4)
    layers = len(loop.state.cache.layers)

    def act(function):
        nonlocal loop
        loop = function(case_state.rewind(loop, 6))

    tokens = jnp.ones((2, 6), jnp.int32)
    cost = speculation.head_cost(headed, tokens, 2, act)["drafting_step_microseconds"]
    assert 0 < cost < 1e7
    assert len(loop.state.cache.layers) == layers == lm.config.num_layers == 2
    row = {"precision": "W4A16KV8", "batch": 2, "prompt_tokens": 6}
    row |= {"decode_step_microseconds": cost / 2}
    costs = {"k": 2, "drafting_step_microseconds": cost}
    costs |= {f"{kind}_step_microseconds": cost for kind in speculation.KINDS}
    _, [cells] = tables.table(
        speculation.COLUMNS, speculation.rows([row | {"speculation": [costs]}])
    )
    assert cells[-1] == "2.00 ×"
    sweep = generate.Sweep(("W4A16KV8",), (1,), (6,), 4, config=lm.config, decoder=Qwen35)
    assert sweep.model_config == lm.config
    assert dataclasses.replace(sweep, speculate=(3,)).model_config == headed.config
    other = generate.Sweep(("W4A16KV8",), (1,), (6,), 4, config=SMALL_MODEL, speculate=(3,))
    assert other.model_config.layers[-1].attention.vocabulary == SMALL_MODEL.vocab_size


def test_kernels_of_a_verifying_step_are_told(lm, take):
    take(matmul=3.0)
    loop = case_state.empty_loop(lm, case_state.endless(2, 4), 150, 4)
    cache = case_state.rewind(loop, 6).state.cache
    assert speculation.verifying_kernels(lm.model, cache, 2) == {"matmul": 3.0}
