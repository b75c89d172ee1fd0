"""Checks of arguments, spans and masks."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks, Span
from mpjax.kernels.checks import (
    as_array,
    as_dtype,
    is_known,
    static_number,
)
from mpjax.kernels.masks import CAUSAL


def test_what_is_given_to_a_traced_function_remains_known():
    """Constants of a program are checked, too: what JAX makes inside of a `jit` is traced."""

    def program(x):
        starts = as_array("starts", [0, 1])
        assert is_known(starts)
        assert starts.dtype == jnp.int32
        mixed = as_array("mixed", [x[0], 1.0])
        assert not is_known(mixed)
        return x + starts.astype(jnp.float32), mixed

    np.testing.assert_array_equal(jax.jit(program)(jnp.ones(2))[0], [1, 2])


class TorchDtype:
    """Looks like a dtype of PyTorch."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        (TorchDtype(), "bfloat16"),
        ("torch.float16", "float16"),
        ("fp16", "float16"),
        ("f16", "float16"),
        ("half", "float16"),
        (np.float16, "float16"),
        ("fp32", "float32"),
        ("f32", "float32"),
        ("float", "float32"),
        ("single", "float32"),
        (jnp.float32, "float32"),
        (np.dtype("float32"), "float32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_by_their_usual_names(value, name):
    assert as_dtype("dtype", value) == jnp.dtype(name)


@pytest.mark.parametrize(
    ("value", "read", "expected"),
    [
        (None, float, None),
        (2, float, 2.0),
        (np.float32(0.5), float, 0.5),
        (jnp.float32(0.5), float, 0.5),
        (np.int32(7), operator.index, 7),
        (jnp.int32(7), operator.index, 7),
    ],
)
def test_static_numbers_become_pythons(value, read, expected):
    found = static_number("x", value, read, "a number")
    assert (found, type(found)) == (expected, type(expected))


def span_of(starts=(3, 0), counts=(2, 1), **changes):
    return Span(np.zeros((2, 4)).astype(int), np.array(starts), np.array(counts), **changes)


@pytest.mark.parametrize(
    ("longest", "new", "most"),
    [(None, (2, 5), 5), (2, (2, 5), 5), (None, (6,), 6), (2, (6,), 2), (9, (6,), 6)],
)
def test_reading_finds_what_no_count_exceeds(longest, new, most):
    """Padded rows have their width; varlen tokens may all be of one sequence."""
    found = span_of(longest=longest).read("append", new)
    assert found.longest == found.most_tokens == most
    assert {array.dtype for array in jax.tree.leaves(found)} == {jnp.dtype("int32")}


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


def test_sinks_become_an_array_for_each_head():
    assert CAUSAL.read("attend", 4) is CAUSAL
    found = Masks(window=5, sinks=[1.0, 2.0]).read("attend", 2)  # type: ignore[arg-type]
    assert isinstance(found.sinks, jax.Array)
    assert found.window == 5
    with pytest.raises(ValueError, match=r"attend: sinks have shape \(2,\): expected \(4,\)"):
        Masks(sinks=jnp.ones(2)).read("attend", 4)
    with pytest.raises(ValueError, match="attend: sinks is 'many': expected an array"):
        Masks(sinks="many").read("attend", 4)  # type: ignore[arg-type]
