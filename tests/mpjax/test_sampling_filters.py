"""Tests of filters: the tokens that top-k, top-p and min-p keep, and the rows that are searched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpjax import sampling as module
from mpjax.kernels.thresholds.api import threshold
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling, sample

process_logits = jax.jit(module.process_logits)  # compiled once, not operation by operation


def random_logits(batch, vocabulary, spread=3.0):
    values = np.random.default_rng(0).normal(scale=spread, size=(batch, vocabulary))
    return values.astype(np.float32)


def softmax(values):
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def test_rows_without_a_filter_are_not_searched(monkeypatch):
    """A greedy row, one whose top-k and top-p keep all, and one that has both filters."""
    wanted = []

    def search(numbers, counts, weights=None, *, implementation):
        wanted.append(counts[:, 0].tolist())
        return jnp.full((3, 1), -jnp.inf)

    monkeypatch.setattr(module, "threshold", search)
    fields = {"temperature": [0.0, 1.0, 1.0], "top_k": [2, 9, 2], "top_p": [0.5, 1.0, 0.5]}
    module.process_logits(jnp.zeros((3, 9)), Sampling(**fields))
    assert wanted == [[0, 0, 2], [0, 0, 2**29]]


def test_logits_in_parts_are_searched_without_a_kernel(monkeypatch):
    """The draws are the same, and the search is one that XLA can divide."""
    logits, keys = jnp.asarray(random_logits(4, 300)), row_keys(range(4))
    sampling = Sampling(temperature=1.3, top_k=[5, 40, 300, 9], top_p=[0.9, 0.5, 0.99, 1.0])
    whole = sample(logits, keys, sampling)
    chosen = []

    def search(*arguments, implementation):
        chosen.append(implementation)
        return threshold(*arguments, implementation=implementation)

    monkeypatch.setattr(module, "threshold", search)
    np.testing.assert_array_equal(sample(logits, keys, sampling, divided=True), whole)
    assert chosen == ["reference"] * 2


@settings(max_examples=100, deadline=None)
@given(
    arrays.arrays(np.float32, (2, 23), elements=st.sampled_from([-1.5, 0.0, 0.5, 2.0, 4.25])),
    st.integers(1, 23),
    st.floats(0.01, 0.99),
)
def test_top_k_and_top_p_keep_what_a_sort_keeps(logits, top_k, top_p):
    """The rule token by token: the fewest of the likeliest, and those that tie with the last."""
    fields = Sampling(temperature=np.ones(2), top_k=np.full(2, top_k), top_p=np.full(2, top_p))
    found = np.isfinite(process_logits(logits, fields))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        rest = np.where(row >= np.sort(row)[-top_k], row, -np.inf)
        order = np.argsort(-rest)
        above = np.concatenate([[0], np.cumsum(softmax(rest)[order])[:-1]])
        least = row[order[above < np.float32(top_p) - 1e-6]].min()
        most = row[order[above < np.float32(top_p) + 1e-6]].min()
        assert row[kept].min() in (least, most)
        np.testing.assert_array_equal(kept, row >= row[kept].min())


def test_top_k_beyond_the_vocabulary_and_full_top_p_keep_everything():
    logits = jnp.asarray(random_logits(2, 5000, spread=0.01))
    assert Sampling(temperature=1.0, top_k=100_000).top_k == 100_000
    for top_k in (3 * 10**9, [2**32 + 2], jnp.asarray([7.0])):
        assert np.all(np.asarray(Sampling(temperature=1.0, top_k=top_k).top_k) > 5)
    sampling = Sampling(temperature=1.0, top_k=10**9, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(process_logits(logits, sampling), logits)
    peaked = jnp.asarray([[50.0, 0.0, 1.0]])  # the first probability rounds to 1
    np.testing.assert_array_equal(
        process_logits(peaked, Sampling(temperature=1.0, top_p=1.0)), peaked
    )


def test_tiny_top_p_and_top_k_one_keep_the_most_likely_token():
    logits = jnp.asarray(random_logits(4, 100))
    best = np.asarray(jnp.argmax(logits, axis=-1))
    for fields in ({"top_p": 1e-30}, {"top_p": 1e-60}, {"top_k": 1}, {"min_p": 0.999999}):
        kept = np.isfinite(process_logits(logits, Sampling(temperature=1.0, **fields)))
        np.testing.assert_array_equal(np.argwhere(kept)[:, 1], best)


def test_tokens_that_tie_with_the_last_one_kept_stay():
    logits = jnp.asarray([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.75}):
        kept = np.isfinite(process_logits(logits, Sampling(temperature=1.0, **fields)))
        assert kept.tolist() == [[True, True, True, True, False]]


def test_tokens_that_sum_to_top_p_need_no_other():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.125, 0.125]]))
    with jax.default_device(jax.devices("cpu")[0]):
        probabilities = jax.nn.softmax(logits)[0].tolist()
        assert probabilities == [0.5, 0.25, 0.125, 0.125], "choose others that are exact"
        for top_p, count in ((0.5, 1), (0.75, 2)):
            kept = np.isfinite(process_logits(logits, Sampling(temperature=1.0, top_p=top_p)))
            assert kept.sum() == count


def test_a_top_k_leaf_of_zero_keeps_the_most_likely_token():
    sampling = jax.tree.map(lambda leaf: leaf if leaf == 1.0 else 0, Sampling(1.0, top_k=5))
    kept = np.isfinite(process_logits(jnp.asarray(random_logits(2, 20)), sampling))
    assert kept.sum(1).tolist() == [1, 1]
