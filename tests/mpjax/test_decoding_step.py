from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.decoding_state import DecodingState, Limits
from mpjax.decoding_step import BatchRule, advance, at_positions, draw
from mpjax.kernels import KVFormat, PagedKVCache
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling
from tests.models.small import small_config, small_model

LOGITS = np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]], np.float32))
LIMITS = Limits.of(3, [2], np.array([5, 2, 5]), 5)


def state_of(counts, finished, seen=None):
    cache = PagedKVCache((), jnp.zeros((3, 1), jnp.int32), jnp.zeros(3, jnp.int32), KVFormat())
    return DecodingState(
        cache=cache,
        keys=row_keys(np.arange(3)),
        tokens=jnp.full((3, 5), 7, jnp.int32),
        logprobs=jnp.zeros((3, 5)),
        counts=jnp.asarray(counts, jnp.int32),
        finished=jnp.asarray(finished),
        seen=seen,
        step=jnp.int32(1),
    )


def test_tokens_are_recorded_for_rows_that_go_on_and_ends_noticed():
    before = state_of([1, 1, 1], [False, False, False], jnp.zeros((3, 3), bool))
    alive = jnp.array([True, True, False])
    after = draw(before, jnp.asarray(LOGITS), BatchRule(Sampling(), LIMITS), alive, divided=False)
    assert after.tokens[:, 1].tolist() == [1, 0, 7]
    assert after.tokens[:, [0, 2]].tolist() == [[7, 7]] * 3
    np.testing.assert_allclose(after.logprobs[:, 1], [np.log(0.6), np.log(0.5), 0], rtol=1e-5)
    assert after.counts.tolist() == [2, 2, 1]
    assert after.finished.tolist() == [False, True, False]  # the second is as long as it may be
    assert np.argwhere(after.seen).tolist() == [[0, 1], [1, 0]]
    assert int(after.step) == 2


@pytest.mark.parametrize("least", [0, 3])
def test_a_stop_token_ends_a_row_that_is_long_enough(least):
    rule = BatchRule(Sampling(min_new_tokens=least), LIMITS)
    before = state_of([1, 1, 1], [False] * 3)
    after = draw(before, jnp.asarray(LOGITS), rule, jnp.ones(3, bool), divided=False)
    assert (int(after.tokens[2, 1]) == 2) == (least == 0)
    assert bool(after.finished[2]) == (least == 0)


def test_stop_tokens_are_hidden_at_positions_before_the_minimum():
    limits = Limits.of(2, [1], np.array([9, 4]), 9)
    rule = BatchRule(Sampling(min_new_tokens=np.array([2, 4])), limits).at_positions(3)
    assert rule.maximum.tolist() == [9, 9, 9, 4, 4, 4]
    found = rule.hide(jnp.zeros((6, 3)), jnp.array([0, 1, 2, 3, 4, 5]))
    assert np.isneginf(found[:, 1]).tolist() == [True, True, False, True, False, False]
    assert not found[:, np.array([0, 2])].any()
    assert BatchRule(Sampling(), limits).hide(found, jnp.zeros(6)) is found


def test_positions_have_the_numbers_of_their_row():
    found = at_positions(Sampling(temperature=np.array([1.0, 2.0]), top_p=0.5), 2)
    assert found.temperature.tolist() == [1, 1, 2, 2]
    assert found.top_p == 0.5


def test_nothing_changes_where_no_row_goes_on():
    before = state_of([1, 1, 1], [True] * 3)
    nobody = jnp.zeros(3, bool)
    after = draw(before, jnp.asarray(LOGITS), BatchRule(Sampling(), LIMITS), nobody, divided=False)
    jax.tree.map(np.testing.assert_array_equal, after.tokens, before.tokens)
    assert (int(after.step), after.counts.tolist()) == (1, [1, 1, 1])


def test_a_step_reads_the_column_before_it():
    model = small_model(small_config(windows=(None,)))
    cache = model.create_cache(2, 16, KVFormat(16), 16)
    state = DecodingState(
        cache=cache,
        keys=row_keys(np.arange(2)),
        tokens=jnp.asarray([[5, 0, 0], [9, 0, 0]], jnp.int32),
        logprobs=jnp.zeros((2, 3)),
        counts=jnp.zeros(2, jnp.int32),
        finished=jnp.zeros(2, bool),
        seen=None,
        step=jnp.int32(1),
    )
    limits = Limits.of(2, [], 9, 3)
    alive = jnp.array([True, False])
    run = jax.jit(lambda state: advance(model, state, BatchRule(Sampling(), limits), alive))
    after = run(state)
    expected = model(jnp.asarray([[5]]))[0, 0].argmax()
    assert after.tokens.tolist() == [[5, int(expected), 0], [9, 0, 0]]
    assert after.cache.lengths.tolist() == [1, 0]
