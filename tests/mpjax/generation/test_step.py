"""One step of generation, and the loop around steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.generation.loop import STRIDE, Loop, repeat
from mpjax.generation.state import State
from mpjax.generation.step import Read, step
from mpjax.kernels import KVFormat
from mpjax.models.state import DecoderCache
from mpjax.sampling.controls import Penalties
from mpjax.sampling.processors import attach
from mpjax.sampling.settings import RowSettings, Sampling
from tests.models.small import small_config, small_model

LOGITS = np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]], np.float32))
ENDS = {"max_new_tokens": np.array([5, 2, 5]), "stop_ids": [2]}


@pytest.fixture(scope="module")
def model():
    return small_model(small_config(windows=(None,)))


def state_of(model, least=0, processors=()):
    cache = DecoderCache((), (), jnp.zeros(3, jnp.int32), KVFormat(), 16)
    settings = RowSettings.of([Sampling(min_new_tokens=least)], 3, **ENDS)
    ones = jnp.ones(3, jnp.int32)
    return State(cache, 7 * ones, ones, ones > 0, settings, processors=processors)


def stepped(model, state, goes_on):
    """The loop of five columns after a step whose logits are given."""
    loop = dataclasses.replace(Loop.begin(state, 5, 3), before=jnp.zeros(3, jnp.int32))
    read = lambda cache: Read(jnp.asarray(LOGITS), cache)  # noqa: E731
    return loop.record(*step(model, state, read, jnp.asarray(goes_on)))


@pytest.mark.parametrize("nobody", [False, True])
def test_tokens_are_recorded_for_rows_that_go_on_and_ends_noticed(model, nobody):
    one = Penalties(*(jnp.full(3, value) for value in (1.0, 0.0, 0.0)))
    state = state_of(model, processors=(attach(one, 3, 3, shared=False),))
    after = stepped(model, state, [not nobody, not nobody, False])
    if nobody:
        assert not after.tokens.any()
        jax.tree.map(np.testing.assert_array_equal, after.state, state)
        return
    assert after.tokens.tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0] * 5]
    expected = [np.log(0.6), np.log(0.5), 0]
    np.testing.assert_allclose(after.logprobs[:, 1], expected, rtol=1e-5)
    assert after.state.newest.tolist() == [1, 0, 7]
    assert after.state.counts.tolist() == [2, 2, 1]
    assert after.state.running.tolist() == [True, False, True]  # the second has its maximum
    assert after.state.processors[0].memory.tolist() == [[0, 2, 0], [2, 0, 0], [0] * 3]


@pytest.mark.parametrize("least", [0, 3])
def test_a_stop_token_ends_a_row_that_is_long_enough(model, least):
    after = stepped(model, state_of(model, least), [True] * 3)
    assert (int(after.tokens[2, 1]) == 2) == (least == 0)
    assert bool(after.state.running[2]) == (least > 0)


def test_a_step_reads_the_newest_token(model):
    cache = model.create_cache(2, 16, KVFormat(16), 16)
    none = jnp.zeros(2, jnp.int32)
    settings = jax.tree.map(jnp.asarray, RowSettings.of([Sampling()], 2))
    state = State(cache, jnp.array([5, 9], jnp.int32), none, none == 0, settings)
    loop = Loop.begin(state, 3, model.columns)
    after = jax.jit(lambda loop: loop.advance(model, jnp.array([True, False])))(loop)
    expected = model(jnp.asarray([[5]]))[0, 0].argmax()
    assert after.tokens.tolist() == [[int(expected), 0, 0], [0, 0, 0]]
    assert after.state.newest.tolist() == [int(expected), 9]
    assert after.state.cache.lengths.tolist() == [1, 0]


@pytest.mark.parametrize("stride", [1, 4])
def test_steps_are_repeated_until_a_look_finds_the_end(stride):
    end = jax.jit(lambda n: repeat(lambda x: x + 1, lambda x: x < n, jnp.int32(0), stride))
    for number in (0, 1, 4, 6):
        assert end(jnp.int32(number)) == -(-number // stride) * stride


def test_on_a_gpu_looks_are_rare(monkeypatch):
    monkeypatch.setattr("mpjax.kernels.device.on_gpu", lambda: True)
    assert repeat(lambda x: x + 1, lambda x: x < 1, jnp.int32(0), None) == STRIDE
