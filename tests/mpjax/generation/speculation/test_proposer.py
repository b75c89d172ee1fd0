"""The arguments of proposers, and rows that are written at places of their own."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import mpjax
from mpjax.generation.speculation.argument import read_speculate
from mpjax.generation.speculation.proposer import Proposer, put

pytestmark = pytest.mark.any_version


def test_rows_are_written_at_their_own_places():
    target = jnp.zeros((3, 4), jnp.int32)
    values = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], jnp.int32)
    found = put(target, values, jnp.array([0, 2, 3]), jnp.array([3, 0, 2]))
    assert found.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [0, 0, 0, 7]]
    one = put(target, values[:, :1], jnp.array([0, 2, 3]), jnp.array([1, 0, 1]))
    assert one.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 7]]
    beyond = put(target, values[:, :1], jnp.array([4, 2, 9]), jnp.array([1, 1, 1]))
    assert beyond.tolist() == [[0, 0, 0, 0], [0, 0, 4, 0], [0, 0, 0, 0]]


def test_speculate_is_a_proposer_or_none(tiny):
    assert read_speculate(None) is None
    assert read_speculate(mpjax.Ngram(2)).k == 2
    for call in (
        lambda odd: mpjax.generate(tiny, "x", speculate=odd),
        lambda odd: mpjax.generate_tokens(tiny.model, [[1]], [1], max_new_tokens=2, speculate=odd),
    ):
        with pytest.raises(ValueError, match=r"speculate is .*ngram.*mpjax\.Ngram\(\)"):
            call("ngram")


def test_a_proposer_has_no_state_unless_it_says_so():
    proposer = Proposer()
    assert proposer.create(1, 2) is None
    assert proposer.read("own", None, None) == proposer.settle("own", *[None] * 3) == "own"
    assert proposer.require(None, 10**6) is None
    with pytest.raises(NotImplementedError):
        proposer.propose(None)
