"""The likeliest token and its log-probability, against separate passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.sampling.greedy import PART, likeliest

pytestmark = pytest.mark.any_version

SIZES = (1, 7, PART, 3 * PART + 5)
compiled = jax.jit(likeliest)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_argmax_with_its_log_softmax(size):
    """Also far from zero, where exponentials would overflow."""
    logits = np.random.default_rng(size).normal(0, 30, (3, size)).astype(np.float32)
    logits[1] += 1e4
    tokens, logprobs = compiled(logits)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)) + wide.max(-1)
    np.testing.assert_allclose(logprobs, wide.max(-1) - total, atol=2e-3, rtol=1e-6)
    np.testing.assert_allclose(logprobs[::2], (wide.max(-1) - total)[::2], atol=1e-5, rtol=1e-6)


def test_of_equal_logits_the_lowest_id_is_taken():
    """Within a part, and in different ones."""
    logits = jnp.zeros((2, 2 * PART)).at[0, [9, 5, PART + 3]].set(2).at[1, [PART + 3, 8]].set(2)
    assert compiled(logits)[0].tolist() == [5, 8]
    assert compiled(jnp.zeros((1, 3 * PART)))[0].tolist() == [0]


def test_hidden_tokens_are_not_taken_but_count():
    logits = jnp.array([[1.0, 5.0, 2.0], [3.0, 0.0, 1.0]])
    allowed = logits.at[:, 1].set(-jnp.inf)
    tokens, logprobs = compiled(logits, allowed)
    assert tokens.tolist() == [2, 0]
    expected = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(logprobs, [expected[0, 2], expected[1, 0]], rtol=1e-6)


@pytest.mark.parametrize("place", [0, 4, PART + 9])
@pytest.mark.parametrize("odd", [jnp.nan, jnp.inf])
def test_rows_that_are_not_finite_say_so(odd, place):
    logits = jnp.zeros((2, 2 * PART)).at[0, place].set(odd)
    tokens, logprobs = compiled(logits)
    assert jnp.isnan(logprobs).tolist() == [True, False]
    assert tokens.tolist() == [place, 0]
    hidden = logits.at[0, place].set(-jnp.inf)
    assert jnp.isnan(compiled(logits, hidden)[1]).tolist() == [True, False]


def test_tokens_without_probability_change_nothing():
    logits = jnp.full((1, 2 * PART), -jnp.inf).at[0, PART + 1].set(-3.0)
    tokens, logprobs = compiled(logits)
    assert (tokens.tolist(), logprobs.tolist()) == ([PART + 1], [0.0])


def test_16_bits_are_read_in_32():
    logits = jnp.arange(700, dtype=jnp.bfloat16)[None] / 64
    tokens, logprobs = compiled(logits)
    wide = logits.astype(jnp.float32)
    assert tokens == wide.argmax(-1)
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(wide).max(-1), rtol=1e-5)
    assert logprobs.dtype == jnp.float32


def test_of_several_nans_the_first_is_taken():
    logits = jnp.zeros((1, 2000)).at[0, jnp.array([700, 90, 1999])].set(jnp.nan)
    token, logprob = likeliest(logits)
    assert token.tolist() == [90]
    assert jnp.isnan(logprob).all()
