"""The gated delta rule against a float64 recurrence, in both forms and with odd gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import DeltaInputs, gated_delta_rule
from mpjax.kernels.recurrent import chunks
from tests.pallas_kernels.recurrent.delta_oracle import draw, recurrence

COUNTS = [150, 0, 1, 4, 1, 65]
run = jax.jit(gated_delta_rule)


def close(found, expected, tolerance=2e-6):
    """Whether the largest error is small beside the largest number."""
    error = np.abs(np.asarray(found) - expected).max(initial=0.0)
    assert error <= tolerance * max(np.abs(expected).max(initial=0.0), 1e-3)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("gates", ["usual", "kept", "forgotten", "mixed"])
def test_long_prompts_are_those_of_the_recurrence(gates, by_channel):
    rng = np.random.default_rng(0)
    inputs = draw(rng, 1500, (1, 2, 16, 8), gates, by_channel=by_channel)
    state = rng.normal(size=(2, 16, 8)).astype(np.float32)
    expected, last = recurrence(inputs, state)
    found, after = run(jax.tree.map(lambda x: x[None], inputs), state[None])
    close(found[0], expected)
    close(after[0], last)


def ragged(form: str, tokens: int = 160):
    """Sequences with NaN in their padding, their states, and the inputs in a form."""
    rng = np.random.default_rng(1)
    rows = [draw(rng, count) for count in COUNTS]
    states = rng.normal(size=(len(COUNTS), 6, 16, 8)).astype(np.float32)

    def pad(x, count):
        return np.concatenate([x, np.full((count, *x.shape[1:]), np.nan, x.dtype)])

    if form == "varlen":
        joined = jax.tree.map(lambda *parts: pad(np.concatenate(parts), 3), *rows)
        return rows, states, joined
    padded = [jax.tree.map(lambda x: pad(x, tokens - len(x)), row) for row in rows]
    return rows, states, jax.tree.map(lambda *parts: np.stack(parts), *padded)


def real(outputs, form: str) -> list:
    if form == "varlen":
        return np.split(np.asarray(outputs)[: sum(COUNTS)], np.cumsum(COUNTS)[:-1])
    return [np.asarray(row)[:count] for row, count in zip(outputs, COUNTS, strict=True)]


@pytest.mark.parametrize("form", ["padded", "varlen"])
def test_ragged_sequences_are_those_of_the_recurrence(form):
    rows, states, inputs = ragged(form)
    outputs, after = run(inputs, states, jnp.array(COUNTS))
    for row, state, found, last in zip(rows, states, real(outputs, form), after, strict=True):
        expected, kept = recurrence(row, state)
        close(found, expected)
        close(last, kept)
    np.testing.assert_array_equal(after[1], states[1])


@pytest.mark.parametrize("form", ["padded", "varlen"])
def test_a_sequence_of_nan_reaches_no_other(form):
    _, states, inputs = ragged(form)
    expected, after = run(inputs, states, jnp.array(COUNTS))
    states[3] = np.nan
    found, last = run(inputs, states, jnp.array(COUNTS))
    for number, (one, other) in enumerate(
        zip(real(found, form), real(expected, form), strict=True)
    ):
        assert np.isnan(one).all() if number == 3 else (one == other).all()
    np.testing.assert_array_equal(np.delete(last, 3, 0), np.delete(after, 3, 0))


def test_single_tokens_are_steps():
    rng = np.random.default_rng(2)
    inputs = draw(rng, 5)
    state = jnp.zeros((1, 6, 16, 8))
    whole, last = run(jax.tree.map(lambda x: x[None], inputs))
    steps = []
    for t in range(5):
        token = jax.tree.map(lambda x, t=t: x[None, t : t + 1], inputs)
        output, state = run(token, state)
        steps.append(output)
    close(jnp.concatenate(steps, 1), np.asarray(whole))
    close(state, np.asarray(last))


def by_steps(inputs, state, counts):
    """The rule as a scan of single tokens."""

    def advance(state, token):
        outputs, after = gated_delta_rule(jax.tree.map(lambda x: x[:, None], token[0]), state)
        kept = jax.lax.expand_dims(token[1] < counts, range(1, 4))
        return jnp.where(kept, after, state), outputs[:, 0]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, outputs = jax.lax.scan(advance, state, (tokens, jnp.arange(inputs.rate.shape[1])))
    return jnp.moveaxis(outputs, 0, 1), state


def varlen(inputs, state, counts):
    """The rule on varlen tokens, of sequences of 11 and 6."""
    joined = jax.tree.map(lambda x: jnp.concatenate([x[0], x[1, :6]]), inputs)
    outputs, after = gated_delta_rule(joined, state, counts)
    second = jnp.pad(outputs[11:], ((0, 5), (0, 0), (0, 0)))
    return jnp.stack([outputs[:11], second]), after


def gradients(rule):
    """The gradients of a loss of the rule's results, compiled."""

    def loss(inputs, state, counts, factors):
        outputs, after = rule(inputs, state, counts)
        is_real = (jnp.arange(11)[None] < counts[:, None])[..., None, None]
        return jnp.sum(jnp.where(is_real, outputs, 0) * factors) + jnp.sum(after**2)

    return jax.jit(jax.grad(loss, (0, 1)))


RULES = [gradients(rule) for rule in (by_steps, run, varlen)]


@pytest.mark.parametrize(
    ("gates", "by_channel"), [("usual", False), ("mixed", False), ("mixed", True)]
)
def test_gradients_are_those_of_the_recurrence(gates, by_channel, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 4)
    rng = np.random.default_rng(3)
    rows = (draw(rng, 11, gates=gates, by_channel=by_channel) for _ in range(2))
    inputs = jax.tree.map(lambda *x: np.stack(x), *rows)
    state, factors = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 6, 16, 8), inputs.value.shape)
    )
    [expected, *others] = (rule(inputs, state, jnp.array([11, 6]), factors) for rule in RULES)
    for found in others:
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            close(one, np.asarray(other), 2e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": np.zeros((2, 7, 5))}, r"inputs are query .*: expected query and key \[batch"),
        ({"value": np.zeros((2, 7, 5, 8)), "decay": np.zeros((2, 7, 5))}, "whole groups of value"),
        ({"state": np.zeros((2, 6, 8, 16))}, r"state is .*: expected .* \(2, 6, 16, 8\)"),
        ({"counts": [8, 1]}, r"counts are \[8, 1\]: expected 0 to 7"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    inputs = vars(draw(np.random.default_rng(4), 7))
    inputs = {name: np.stack([x, x]) for name, x in inputs.items()}
    others = {name: wrong[name] for name in wrong if name not in inputs}
    inputs |= {name: wrong[name] for name in wrong if name in inputs}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(DeltaInputs(**inputs), **others)
