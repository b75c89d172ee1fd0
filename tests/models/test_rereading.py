from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models.rereading import read_again, reads_again
from tests.models.small import CONFIG
from tests.mpjax.rotary_lengths import ORIGINAL, model_of


def test_which_sequences_are_read_again():
    longrope, dynamic = (model_of(kind).config for kind in ("longrope", "dynamic"))
    assert [reads_again(longrope, n) for n in (ORIGINAL, ORIGINAL + 1)] == [False, True]
    assert not reads_again(dynamic, 99)
    assert not reads_again(CONFIG, 99)
    short = dataclasses.replace(longrope, max_position_embeddings=ORIGINAL)
    assert not reads_again(short, 99)


@pytest.mark.parametrize("format", ["KV16", "KV4", "K4cV4c"])
def test_a_sequence_is_read_again_with_the_long_factors(rng, format):
    """The third sequence is short, and the fourth goes not on."""
    model = model_of("longrope")
    tokens = jnp.asarray(rng.integers(0, 50, (4, 30)), jnp.int32)
    counts = jnp.asarray([ORIGINAL, ORIGINAL - 1, 5, ORIGINAL], jnp.int32)
    step = jax.jit(model.step, static_argnames="fresh")
    fresh = format != "KV4"  # else prompts attend to what the cache stores
    begun = model.create_cache(4, 256, format, 128).begin(counts)
    _, cache = step(tokens, counts, begun, fresh=fresh)
    upcoming = jnp.asarray([1, 2, 3, 0])
    again = jax.jit(lambda cache: read_again(model, cache, upcoming, lambda row: tokens[row]))(
        cache
    )
    np.testing.assert_array_equal(again.lengths, counts)
    np.testing.assert_array_equal(again.rotary_lengths, [ORIGINAL + 1, ORIGINAL + 1, 5, ORIGINAL])
    empty = model.create_cache(4, 256, format, 128)
    long = dataclasses.replace(empty, rotary_lengths=again.rotary_lengths)
    _, expected = step(tokens, counts, long, fresh=fresh)
    next_token = tokens[:, -1:], jnp.ones(4, jnp.int32)
    found = step(*next_token, again)[0]
    np.testing.assert_allclose(found, step(*next_token, expected)[0], atol=1e-4)
    np.testing.assert_array_equal(found[2:], step(*next_token, cache)[0][2:])
    assert abs(found[:2] - step(*next_token, cache)[0][:2]).max() > 0.1


def test_a_step_needs_a_cache_of_the_model():
    cache = model_of("dynamic").create_cache(1, 64, "KV16")
    cache = dataclasses.replace(cache, rotary_lengths=None)
    with pytest.raises(ValueError, match=r"no rotary lengths: create .* with model\.create_cache"):
        model_of("dynamic").step(jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), cache)
