from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import KVFormat
from mpjax.models.state import DecoderCache
from mpjax.models.step_checks import require_counts, require_empty, require_positions
from tests.models.small import CONFIG

TOKENS = jnp.zeros((2, 3), jnp.int32)


def test_sequences_up_to_all_positions():
    require_positions(CONFIG, 256)
    with pytest.raises(ValueError, match="257 tokens would pass the 256 positions of this model"):
        require_positions(CONFIG, 257)


def test_a_count_for_each_row():
    require_counts(jnp.array([0, 3]), TOKENS)
    with pytest.raises(ValueError, match=r"expected integers of shape \(2,\), one for each"):
        require_counts(jnp.array([3]), TOKENS)
    with pytest.raises(ValueError, match=r"counts are \[4, 1\]: expected 0 to 3"):
        require_counts(jnp.array([4, 1]), TOKENS)
    jax.eval_shape(lambda counts: require_counts(counts, TOKENS), jnp.array([4, 1]))


def test_an_empty_cache():
    cache = DecoderCache((), (), jnp.zeros(2, jnp.int32), KVFormat(), 16)
    require_empty(cache)
    full = dataclasses.replace(cache, lengths=cache.lengths + 1)
    with pytest.raises(ValueError, match=r"the cache holds \[1, 1\] tokens, and fresh says"):
        require_empty(full)
