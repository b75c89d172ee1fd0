"""The causal convolution against a loop over tokens, and what padding and states do to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import causal_convolution

COUNTS = [5, 0, 1, 2]
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def convolved(tokens, weight, state, bias):
    """One sequence, in float64: tokens [tokens, channels], state [width − 1, channels]."""
    rows = np.concatenate([state, tokens]).astype(np.float64)
    width = weight.shape[1]
    sums = [
        sum(weight[:, j] * rows[t + j] for j in range(width)) + bias for t in range(len(tokens))
    ]
    return np.array([s / (1 + np.exp(-s)) for s in sums]), rows[len(rows) - width + 1 :]


def inputs(form: str, width: int):
    """Sequences whose padding is NaN, in both forms; and a weight, a state and a bias."""
    rows = [draw(count, 6) for count in COUNTS]
    x = np.full((4, 7, 6), np.nan, np.float32)
    for row, values in zip(x, rows, strict=True):
        row[: len(values)] = values
    if form == "varlen":
        x = np.concatenate([*rows, np.full((2, 6), np.nan, np.float32)])
    return x, rows, draw(6, width), draw(4, width - 1, 6), draw(6)


def real(y, form: str) -> list:
    if form == "varlen":
        return np.split(np.asarray(y)[: sum(COUNTS)], np.cumsum(COUNTS)[:-1])
    return [np.asarray(row)[:count] for row, count in zip(y, COUNTS, strict=True)]


@pytest.mark.parametrize("form", ["padded", "varlen"])
@pytest.mark.parametrize("width", [4, 3, 1])
def test_real_tokens_and_states_are_those_of_a_loop(form, width):
    x, rows, weight, state, bias = inputs(form, width)
    options = {"bias": bias, "activation": "silu"}
    y, after = causal_convolution(x, weight, state, np.array(COUNTS), **options)
    for found, last, tokens, before in zip(real(y, form), after, rows, state, strict=True):
        expected, kept = convolved(tokens, weight, before, bias)
        np.testing.assert_allclose(found, expected.reshape(-1, 6), atol=1e-5)
        np.testing.assert_array_equal(last, kept.astype(np.float32))


@pytest.mark.parametrize("form", ["padded", "varlen"])
def test_two_pieces_are_one_sequence_and_no_state_is_zeros(form):
    x, weight = draw(2, 9, 5), draw(5, 4)
    whole, last = causal_convolution(x, weight)
    first, second = x[:, :2], x[:, 2:]
    if form == "varlen":
        first, second = (part.reshape(-1, 5) for part in (first, second))
    y, state = causal_convolution(first, weight, None, [2, 2])
    z, state = causal_convolution(second, weight, state, [7, 7])
    joined = np.concatenate([np.reshape(y, (2, 2, 5)), np.reshape(z, (2, 7, 5))], 1)
    np.testing.assert_allclose(joined, whole, atol=1e-6)
    np.testing.assert_array_equal(state, last)


def test_a_state_keeps_its_dtype():
    """A state in float32 is not rounded by a step in 16 bits that leaves some of it."""
    state = draw(1, 3, 2)
    y, after = causal_convolution(jnp.ones((1, 1, 2), "bfloat16"), draw(2, 4), state)
    assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(after[:, :2], state[:, 1:])


@pytest.mark.parametrize("form", ["padded", "varlen"])
def test_padding_reaches_no_gradient(form):
    x, rows, weight, state, bias = inputs(form, 4)

    def loss(x, rows, weight, state):
        y, after = causal_convolution(x, weight, state, jnp.array(COUNTS), bias=bias)
        kept = [y[i, : len(r)] if form == "padded" else None for i, r in enumerate(rows)]
        total = y[: sum(COUNTS)].sum() if form == "varlen" else sum(k.sum() for k in kept)
        return total + (after**2).sum()

    found = jax.grad(loss, (0, 2, 3))(x, rows, weight, state)
    assert all(bool(jnp.isfinite(each).all()) for each in found)

    def plain(weight):
        total = 0.0
        for tokens, before in zip(rows, state, strict=True):
            y, _ = causal_convolution(tokens[None], weight, before[None], bias=bias)
            total += y.sum()
        return total

    np.testing.assert_allclose(found[1], jax.grad(plain)(weight), rtol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": draw(6)}, r"x is float32 of shape \(6,\): expected \[batch, tokens, channels\]"),
        ({"x": draw(7, 6)}, "counts is None: expected those of varlen x"),
        ({"weight": draw(4, 6)}, r"weight is .*: expected \[channels, width\] for the 6 channels"),
        ({"state": draw(2, 4, 6)}, r"state is .*: expected .* is \(2, 3, 6\)"),
        ({"counts": np.array([8, 1])}, r"counts are \[8, 1\]: expected 0 to 7"),
        ({"x": draw(7, 6), "counts": np.array([4, 4])}, "expected 0 to 7.*, and no more in all"),
        ({"bias": draw(5)}, r"bias is .*: expected \[channels\], 6 of them"),
        ({"activation": "gelu"}, "activation is 'gelu': expected 'silu' or None"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        causal_convolution(**{"x": draw(2, 7, 6), "weight": draw(6, 4)} | wrong)
