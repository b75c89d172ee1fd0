from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from mpjax import Draft, Ngram
from mpjax.engine.histories import (
    begin_history,
    begin_rows,
    create_histories,
    extend_histories,
    put_histories,
    state_bytes,
)


def test_a_slot_begins_anew_and_others_stay():
    histories = create_histories(Ngram(), slots=3, tokens=6)
    own = jnp.array([4, 5, 6], jnp.int32)
    histories = type(histories)(histories.history + 7, type(histories.own)(own, own), None)
    row = jnp.int32(1), jnp.array([1, 2, 0, 0, 0, 0], jnp.int32), jnp.int32(2)
    found = begin_history(Ngram(), histories, *row)
    assert found.history.tolist() == [[7] * 6, [1, 2, 0, 0, 0, 0], [7] * 6]
    assert found.own.refused.tolist() == found.own.resume.tolist() == [4, 0, 6]


def test_rows_of_some_slots_are_taken_and_put_back():
    histories = create_histories(Ngram(), slots=3, tokens=2)
    slots = jnp.array([2, 0], jnp.int32)
    rows = begin_rows(Ngram(), histories, slots)
    assert rows.done.steps.tolist() == [0, 0]
    rows = dataclasses.replace(rows, history=rows.history + jnp.array([[1], [2]], jnp.int32))
    found = put_histories(Ngram(), histories, jnp.array([2, 3]), rows)  # the second one is padding
    assert found.history.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert found.done is None


def test_the_bytes_are_those_of_the_arrays(tiny):
    assert state_bytes(None, 3, 10) == 0
    assert state_bytes(Ngram(), 3, 10) == 3 * 10 * 4 + 2 * 3 * 4
    draft = Draft(tiny, 2)
    assert state_bytes(draft, 3, 10) > draft.create(3, 10).nbytes


def test_tokens_are_added_to_slots_and_padding_has_none():
    histories = create_histories(Ngram(), slots=2, tokens=3)
    rows = jnp.array([1, 2], jnp.int32)
    found = extend_histories(histories, rows, jnp.array([2, 0]), jnp.array([9, 8], jnp.int32))
    assert found.history.tolist() == [[0, 0, 0], [0, 0, 9]]
    assert extend_histories(None, rows, rows, rows) is None
    assert create_histories(None, 2, 3) is None
