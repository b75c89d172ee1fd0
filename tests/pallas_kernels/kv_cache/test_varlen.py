from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpjax.kernels import Span
from mpjax.kernels.kv_cache import varlen

tokens_of = jax.jit(varlen.tokens_of, static_argnums=1)


@settings(max_examples=20)
@example(counts=[5, 5, 5, 5], tokens=20)
@example(counts=[3], tokens=3)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.sampled_from([20, 23]))
def test_tokens_of(counts, tokens):
    owners = [(b, t) for b, count in enumerate(counts) for t in range(count)]
    found = tokens_of(np.array(counts, np.int32), tokens)
    assert found.is_real.tolist() == [True] * len(owners) + [False] * (tokens - len(owners))
    pairs = zip(found.sequence.tolist(), found.number.tolist(), strict=True)
    assert list(pairs)[: len(owners)] == owners
    assert found.sequence.max() < len(counts)


def test_single_tokens_have_the_page_and_slot_of_their_position(rng):
    """The second sequence has room for one more token than three, and the last one is padding."""
    tables = rng.permutation(8).astype(np.int32).reshape(2, 4)
    arrays = (jnp.asarray(x) for x in (tables, np.array([30, 63]), np.array([3, 2])))
    found = varlen.as_single_tokens(Span(*arrays), 6, 16)
    assert found.block_tables[:4, 0].tolist() == [
        tables[0, 1],
        tables[0, 1],
        tables[0, 2],
        tables[1, 3],
    ]
    assert found.starts[:4].tolist() == [14, 15, 0, 15]
    assert found.counts.tolist() == [1, 1, 1, 1, 0, 0]
    assert found.longest == 1


def test_tokens_at_negative_positions_are_no_sequences(rng):
    tables = jnp.asarray(rng.permutation(4).astype(np.int32).reshape(1, 4))
    found = varlen.as_single_tokens(Span(tables, jnp.array([-2]), jnp.array([4])), 4, 16)
    assert found.counts.tolist() == [0, 0, 1, 1]
    assert found.starts[2:].tolist() == [0, 1]
    assert found.block_tables[2:, 0].tolist() == [int(tables[0, 0])] * 2
