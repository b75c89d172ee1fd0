"""The cost of a verifying step, on a small model."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.bench import case_state, generate, speculation
from mpjax.models import Qwen3
from mpjax.precision import Precision
from tests.mpjax.bench.rows import SMALL_MODEL, generate_row


@pytest.fixture(scope="module")
def lm():
    sweep = generate.Sweep(("W16A16KV8",), (1,), (6,), 4, config=SMALL_MODEL, decoder=Qwen3)
    return generate._load(sweep, Precision.parse("W16A16KV8"))[0]


def test_costs_are_measured_and_the_state_is_given_back(lm):
    state = case_state.empty_state(lm, 1, 150, 4)
    limits, given = generate.Limits.of(1, (), 4, 4), []

    def act(function):
        nonlocal state
        state = function(case_state.rewind(state, 6))
        given.append(state.speculation)

    found = speculation.step_costs(lm.model, jnp.arange(6)[None], limits, 2, act)
    assert found["k"] == 2
    assert 0 < found["proposing_step_microseconds"] < 1e7
    assert 0 < found["verifying_step_microseconds"] < 1e7
    assert given == [None] * 2 * speculation.ROUNDS
    assert state.cache.lengths.tolist() == [9]


def test_kernels_of_a_verifying_step_are_told(lm, take):
    take(matmul=3.0)
    state = case_state.rewind(case_state.empty_state(lm, 2, 150, 4), 6)
    assert speculation.verifying_kernels(lm.model, state, 2) == {"matmul": 3.0}


def test_rows_are_in_the_order_of_the_headers():
    costs = {"k": 4, "verifying_step_microseconds": 2500.0, "proposing_step_microseconds": 2040.0}
    [cells] = speculation.rows(generate_row(speculation=[costs]))
    assert dict(zip(speculation.HEADERS, cells, strict=True)) == {
        "precision": "W4A16KV8",
        "batch": "2",
        "context": "2048",
        "k": "4",
        "step": "2000 µs",
        "proposing none": "1.02 ×",
        "verifying k": "1.25 ×",
    }
    assert speculation.rows(generate_row()) == []
