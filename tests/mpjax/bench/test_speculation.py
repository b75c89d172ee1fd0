"""The cost of a verifying step, on a small model."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.bench import case_state, generate, speculation
from mpjax.models import Qwen3
from mpjax.precision import Precision
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


def test_kernels_of_a_verifying_step_are_told(lm, take):
    take(matmul=3.0)
    loop = case_state.empty_loop(lm, case_state.endless(2, 4), 150, 4)
    cache = case_state.rewind(loop, 6).state.cache
    assert speculation.verifying_kernels(lm.model, cache, 2) == {"matmul": 3.0}
