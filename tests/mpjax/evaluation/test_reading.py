from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.evaluation import reading
from mpjax.evaluation.reading import read
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError

SEQUENCES = [np.arange(1, 4), np.arange(7, 30), np.asarray([], int), np.asarray([5]), np.arange(9)]


def positions(models, tokens, counts, caches):
    """As scores the tokens themselves, and the places at which they stand in the caches."""
    places = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1] - 1)[None]
    caches = tuple(dataclasses.replace(c, lengths=c.lengths + counts) for c in caches)
    return (jnp.asarray(tokens[:, 1:]), places), caches


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_scores_come_in_the_order_given(tiny, monkeypatch, batch):
    monkeypatch.setattr(reading, "MAXIMUM_CHUNK", 8)
    found = read([tiny, tiny], positions, SEQUENCES, batch=batch)
    for ids, (tokens, places) in zip(SEQUENCES, found, strict=True):
        np.testing.assert_array_equal(tokens, ids[1:])
        np.testing.assert_array_equal(places, np.arange(max(len(ids) - 1, 0)))
    assert read([tiny], positions, []) == []


def test_a_bar_names_the_precision_and_what_happens(tiny, capfd):
    read([tiny], positions, SEQUENCES, progress=False)
    assert capfd.readouterr().err == ""
    read([tiny], positions, SEQUENCES, progress=True)
    shown = capfd.readouterr().err
    assert 0 <= shown.find("W32A32KV16: compiling") < shown.find("W32A32KV16: reading")


def test_caches_and_logits_of_all_models_must_fit(tiny, monkeypatch):
    other = dataclasses.replace(tiny, kv_format=KVFormat(8))
    caches = [lm.model.create_cache(1, 128, lm.kv_format).nbytes for lm in (tiny, other)]
    logits = 2 * 128 * tiny.config.vocab_size * 4
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: sum(caches) + logits - 1)
    with pytest.raises(DeviceMemoryError, match="128 tokens with KV16 and KV8 needs"):
        read([tiny, other], positions, [np.ones(100, int)])
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: sum(caches) + logits)
    assert len(read([tiny, other], positions, [np.ones(100, int)])) == 1
