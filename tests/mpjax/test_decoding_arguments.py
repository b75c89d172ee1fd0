"""The arguments of `generate_tokens`, seen where it passes them on to prefill."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.generation import decoding
from mpjax.generation.decoding import generate_tokens
from mpjax.kernels import KVFormat
from mpjax.sampling.token_lists import NO_ID

LENGTHS = (5, 1, 9)
ROWS = len(LENGTHS)


class Seen(Exception):
    """Ends a call where a test has seen enough."""


@pytest.fixture
def given_to_prefill(tiny, monkeypatch):
    """Arguments that generate_tokens passes to prefill: the cache, the settings, the columns."""

    def see(model, tokens, lengths, *rest, **options):
        raise Seen(*rest[:3])

    monkeypatch.setattr(decoding, "jit_prefill", see)

    def call(**options):
        with pytest.raises(Seen) as seen:
            generate_tokens(tiny.model, jnp.ones((ROWS, 16), int), jnp.asarray(LENGTHS), **options)
        return seen.value.args

    return call


def test_what_is_not_given_has_a_default(tiny, given_to_prefill):
    cache, settings, columns = given_to_prefill(max_new_tokens=3)
    assert (cache.format, cache.page_size, columns) == (KVFormat(16), 128, 3)
    assert settings.key_words.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert settings.greedy
    assert settings.max_new_tokens.tolist() == [3] * ROWS
    assert stop_tokens(settings) == set(tiny.config.stop_ids) == {0}
    options = {"max_new_tokens": 3, "kv_format": "KV8", "seeds": [5, 6, 7]}
    sampling = {"temperature": 1.5, "min_new_tokens": 2, "stop_ids": (4,)}
    cache, settings, _ = given_to_prefill(sampling=sampling, **options)
    assert cache.format == KVFormat(8)
    assert settings.key_words[:, 1].tolist() == [5, 6, 7]
    assert (settings.temperature.tolist(), settings.min_new_tokens.tolist()) == ([1.5] * 3, [2] * 3)
    assert stop_tokens(settings) == {4}
    assert stop_tokens(given_to_prefill(sampling={"stop_ids": ()}, **options)[1]) == set()


def stop_tokens(settings):
    return set(settings.stop_ids.ravel().tolist()) - {NO_ID}


def test_prompt_and_new_tokens_may_fill_all_positions(tiny, given_to_prefill):
    # The last token is never read, and so has no position.
    room = tiny.config.max_position_embeddings - max(LENGTHS) + 1
    given_to_prefill(max_new_tokens=room)
    with pytest.raises(ValueError, match=f"{room + 1} new tokens would pass the 256 positions"):
        given_to_prefill(max_new_tokens=room + 1)
