from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import KVFormat, PagedKVCache, Span
from mpjax.models.riders import RidersSpan, last_tokens
from tests.models.small import small_config, small_model
from tests.pallas_kernels.oracles import relative_error, wide
from tests.sweeps import in_sweep


@pytest.fixture
def span():
    tables, lengths = np.arange(12, dtype=np.int32).reshape(4, 3), np.array([0, 5, 7, 9], np.int32)
    residuals = np.array([[3], [1], [0], [2]], np.int32)
    cache = PagedKVCache((), jnp.asarray(tables), jnp.asarray(lengths), KVFormat(), residuals)
    counts, encoded = jnp.asarray([4, 0, 1, 0]), jnp.asarray([0, 5])
    return RidersSpan.of(cache, counts, encoded, 2)


def test_the_last_sequences_are_rows(span):
    assert isinstance(span.prompts, Span)
    assert span.prompts.starts.tolist() == [0, 5]
    assert span.prompts.encoded.tolist() == [0, 5]
    assert span.rows.starts.tolist() == [7, 9]
    assert span.rows.counts.tolist() == [1, 0]
    assert span.rows.residual_pages.tolist() == [[0], [2]]
    assert span.rows.encoded is None
    assert (span.block_tables.shape, span.fresh) == ((2, 3), False)


def test_tokens_are_cut_in_two(span):
    x = jnp.arange(2 * 7 * 3).reshape(2, 7, 3)
    prompts, rows = span.parts(7)
    assert (prompts.span, rows.span) == (span.prompts, span.rows)
    np.testing.assert_array_equal(prompts.of(x, leading=1), x[:, :5])
    np.testing.assert_array_equal(rows.of(x, leading=1), x[:, 5:, None])
    np.testing.assert_array_equal(rows.of(x[0]), x[0, 5:, None])


def test_the_last_token_of_each_sequence(span):
    assert last_tokens(span.prompts, 7).tolist() == [3, 3]
    assert last_tokens(span, 7).tolist() == [3, 3, 5, 6]


@pytest.mark.parametrize("text", ["KV4cg32", in_sweep("KV8")])
def test_riders_are_rows_behind_the_prompts(text, rng):
    """They have the logits of steps of their own, and one with the count 0 adds nothing."""
    model = small_model(small_config(windows=(None,)))
    prompts, format = rng.integers(1, 50, (4, 34)).astype(np.int32), KVFormat.parse(text)
    rows = model.create_cache(4, 64, format, 32)
    graph, state = nnx.split(model)
    counts = np.array([5, 31, 32, 32], np.int32)

    @functools.partial(jax.jit, static_argnums=3)
    def step(tokens, counts, cache, riders):
        return nnx.merge(graph, state).step_varlen(tokens, counts, cache, riders=riders)

    begun = np.concatenate([row[:n] for row, n in zip(prompts, counts, strict=True)])
    _, cache = step(begun, counts, rows, 0)
    following = [row[n:] for row, n in zip(prompts, counts, strict=True)]
    new = np.array([2, 1, 1, 0], np.int32)
    tokens = np.concatenate([following[0][:2], following[1][:1], [7] * 3])
    tokens = np.concatenate([tokens, following[2][:1], following[3][:1]]).astype(np.int32)
    logits, after = step(tokens, new, cache, 2)
    np.testing.assert_array_equal(after.lengths, counts + new)
    expected, own = step(np.append(tokens[:3], tokens[6]), new, cache, 0)
    assert relative_error(logits[:3], wide(expected[:3])) < 1e-4
    ones = np.ones(4, np.int32)
    again = [step(np.full(4, 9, np.int32), ones, found, 0)[0] for found in (after, own)]
    assert relative_error(again[0], wide(again[1])) < 1e-4
