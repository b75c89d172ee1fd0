from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax import Ngram
from mpjax.engine.histories import begin_history, create_histories, extend_histories


def test_a_slot_begins_anew_and_others_stay():
    histories = create_histories(Ngram(), slots=3, tokens=6)
    own = jnp.array([4, 5, 6], jnp.int32)
    histories = type(histories)(histories.history + 7, type(histories.own)(own, own), None)
    found = begin_history(Ngram(), histories, np.int32(1), jnp.array([1, 2, 0, 0, 0, 0]))
    assert found.history.tolist() == [[7] * 6, [1, 2, 0, 0, 0, 0], [7] * 6]
    assert found.own.refused.tolist() == found.own.resume.tolist() == [4, 0, 6]


def test_tokens_are_added_to_slots_and_padding_has_none():
    histories = create_histories(Ngram(), slots=2, tokens=3)
    rows = jnp.array([1, 2], jnp.int32)
    found = extend_histories(histories, rows, jnp.array([2, 0]), jnp.array([9, 8], jnp.int32))
    assert found.history.tolist() == [[0, 0, 0], [0, 0, 9]]
    assert extend_histories(None, rows, rows, rows) is None
    assert create_histories(None, 2, 3) is None
