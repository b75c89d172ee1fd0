"""The arguments of `generate_tokens`, seen where it passes them on to prefill."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax import decoding, decoding_state
from mpjax.decoding import generate_tokens
from mpjax.kernels import KVFormat
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling

LENGTHS = (5, 1, 9)
ROWS = len(LENGTHS)


class Seen(Exception):
    """Ends a call where a test has seen enough."""


@pytest.fixture
def given_to_prefill(tiny, monkeypatch):
    """The arguments that generate_tokens passes to prefill: (cache, keys, sampling, limits)."""

    def see(model, tokens, lengths, *rest, **options):
        raise Seen(*rest)

    monkeypatch.setattr(decoding, "jit_prefill", see)

    def call(**options):
        with pytest.raises(Seen) as seen:
            generate_tokens(tiny.model, jnp.ones((ROWS, 16), int), jnp.asarray(LENGTHS), **options)
        return seen.value.args

    return call


def test_what_is_not_given_has_a_default(tiny, given_to_prefill):
    cache, keys, sampling, limits = given_to_prefill(max_new_tokens=3)
    assert (cache.format, cache.page_size) == (KVFormat(16), 128)
    assert (keys == row_keys(range(ROWS))).all()
    assert sampling == Sampling(min_new_tokens=0)
    assert limits.room == 3
    assert limits.maximum.tolist() == [3] * ROWS
    assert stop_tokens(limits) == set(tiny.config.stop_ids) == {0}
    cache, keys, sampling, limits = given_to_prefill(
        max_new_tokens=3,
        kv_format="KV8",
        seeds=[5, 6, 7],
        sampling=Sampling(temperature=1.5, min_new_tokens=2, stop_ids=(4,)),
    )
    assert cache.format == KVFormat(8)
    assert (keys == row_keys([5, 6, 7])).all()
    assert sampling == Sampling(temperature=1.5, min_new_tokens=2)
    assert stop_tokens(limits) == {4}
    assert stop_tokens(given_to_prefill(max_new_tokens=3, sampling={"stop_ids": ()})[3]) == set()


def stop_tokens(limits):
    """The stop tokens that a vocabulary can have."""
    assert len(limits.stop_ids) % decoding_state.STOP_IDS == 0
    return set(limits.stop_ids.tolist()) - {2**31 - 1}


def test_prompt_and_new_tokens_may_fill_all_positions(tiny, given_to_prefill):
    # The last token is never read, and so has no position.
    room = tiny.config.max_position_embeddings - max(LENGTHS) + 1
    given_to_prefill(max_new_tokens=room)
    with pytest.raises(ValueError, match=f"{room + 1} new tokens would pass the 256 positions"):
        given_to_prefill(max_new_tokens=room + 1)
