from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Span


def span_of(starts=(3, 0), counts=(2, 1), **changes):
    return Span(np.zeros((2, 4)).astype(int), np.array(starts), np.array(counts), **changes)


def test_what_is_static_is_no_leaf():
    first, other = span_of(), span_of(fresh=np.bool(True), longest=np.int64(2))
    assert len(jax.tree.leaves(first)) == len(jax.tree.leaves(other)) == 3
    assert jax.tree.structure(first) != jax.tree.structure(other)
    assert jax.tree.structure(other) == jax.tree.structure(span_of(fresh=True, longest=2))


def test_leaves_may_be_anything():
    """As those of axes and shapes are."""
    assert jax.tree.map(lambda _: "leaf", span_of(longest=3)).counts == "leaf"
    assert jax.eval_shape(lambda span: span, span_of()).starts.shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"longest": 0}, "longest is 0: expected a number of tokens, or None"),
        ({"longest": 2.5}, "longest is 2.5: expected a number of tokens, or None"),
        ({"fresh": 1}, "fresh is 1: expected a bool"),
    ],
)
def test_what_is_static_must_make_sense(change, message):
    with pytest.raises(ValueError, match=f"Span: {message}"):
        span_of(**change)


def test_ends_and_offsets():
    span = Span(jnp.zeros((3, 1)), jnp.array([5, 0, 7]), jnp.array([2, 0, 3]))
    assert span.ends.tolist() == [7, 0, 10]
    assert span.offsets.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("longest", "new", "most"),
    [(None, (2, 5), 5), (2, (2, 5), 5), (None, (6,), 6), (2, (6,), 2), (9, (6,), 6)],
)
def test_reading_finds_what_no_count_exceeds(longest, new, most):
    """Padded rows have their width; varlen tokens may all be of one sequence."""
    found = span_of(longest=longest).read("append", new)
    assert found.longest == found.most_tokens == most
    assert {array.dtype for array in jax.tree.leaves(found)} == {jnp.dtype("int32")}


def test_lists_are_read_as_arrays_and_freshness_stays():
    found = Span([[0]], [0], [3], fresh=True).read("append", (1, 3))  # type: ignore[arg-type]
    assert found.block_tables.tolist() == [[0]]
    assert found.fresh


@pytest.mark.parametrize(
    ("change", "new", "message"),
    [
        ({"starts": (-1, 0)}, (2, 5), r"starts are \[-1, 0\]: expected 0 or above"),
        ({"starts": (3, 0), "fresh": True}, (2, 5), r"starts are \[3, 0\]: expected 0 in a fresh"),
        ({"counts": (9, 0)}, (2, 5), r"counts are \[9, 0\]: expected 0 to 5, the new tokens"),
        ({"longest": 1}, (2, 5), r"counts are \[2, 1\]: expected 0 to 1, the longest of the span"),
        ({"longest": 1}, (5,), r"counts are \[2, 1\]: .* 1, the longest .* more than 5 in all"),
        ({"counts": (3, 3)}, (5,), r"counts are \[3, 3\]: .* 5, the new .* no more than 5 in all"),
        ({}, (3, 5), "tokens are of a batch of 3: expected 2, that of block_tables, starts and"),
        ({"starts": (0.0, 1.0)}, (2, 5), r"starts is float.* of shape \(2,\): expected int32"),
        ({"counts": (1, 1, 1)}, (2, 5), r"counts is int.* of shape \(3,\): .*block_tables is 2"),
        ({"encoded": [1]}, (2, 5), r"encoded is int.* of shape \(1,\): expected int32 of .*\(2,\)"),
        ({"residual_pages": np.ones((2, 1))}, (2, 5), r"residual_pages is float.* shape \(2, 1\)"),
    ],
)
def test_what_does_not_fit_the_tokens_is_named(change, new, message):
    with pytest.raises(ValueError, match=f"append: {message}"):
        span_of(**change).read("append", new)


def test_values_that_are_traced_are_taken():
    wrong = span_of(starts=(-1, 0), counts=(9, 0), fresh=True, longest=1)
    found = jax.eval_shape(lambda span: span.read("append", (2, 5)), wrong)
    assert dataclasses.replace(found, fresh=False, longest=None).starts.dtype == jnp.int32
