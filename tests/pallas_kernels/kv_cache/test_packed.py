from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_cache import packed

counts_and_padding = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 4)
).filter(lambda drawn: sum(drawn[0]) + drawn[1] > 0)


@settings(max_examples=10)  # each compiles for its own sizes
@given(counts_and_padding)
def test_tokens_of(drawn):
    counts, padding = drawn
    owners = [(b, t) for b, count in enumerate(counts) for t in range(count)]
    found = packed.tokens_of(jnp.array(counts, jnp.int32), len(owners) + padding)
    assert found.is_real.tolist() == [True] * len(owners) + [False] * padding
    pairs = zip(found.sequence.tolist(), found.number.tolist(), strict=True)
    assert list(pairs)[: len(owners)] == owners
    assert found.sequence.max() < len(counts)


def test_single_tokens_have_the_page_and_slot_of_their_position(rng):
    """The second sequence has room for one more token than three, and the last one is padding."""
    tables = rng.permutation(8).astype(np.int32).reshape(2, 4)
    pages, starts, counts = packed.as_single_tokens(
        *(jnp.asarray(x) for x in (tables, np.array([30, 63]), np.array([3, 2]))), 6, 16
    )
    assert pages[:4, 0].tolist() == [tables[0, 1], tables[0, 1], tables[0, 2], tables[1, 3]]
    assert starts[:4].tolist() == [14, 15, 0, 15]
    assert counts.tolist() == [1, 1, 1, 1, 0, 0]
