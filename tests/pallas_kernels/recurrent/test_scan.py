"""The scan of a state space against a loop over tokens in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import state_space_scan
from mpjax.kernels.recurrent import chunks

HEADS, GROUPS, CHANNELS, STATES = 4, 2, 6, 5
COUNTS = [37, 0, 1, 16]


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def sequence(rng: np.random.Generator, tokens: int, decays: str) -> tuple[np.ndarray, ...]:
    """x, steps, b, c; with rates of −1, decays are exp(−step)."""
    steps = {
        "usual": rng.uniform(0, 1, (tokens, HEADS)),
        "near 1": rng.uniform(0, 1e-4, (tokens, HEADS)),
        "near 0": rng.uniform(50, 200, (tokens, HEADS)),
        # A decay of 0 among those near 1: sums from the begin would lose the small ones.
        "mixed": np.where(rng.random((tokens, HEADS)) < 0.1, 3e5, 1e-3),
    }[decays].astype(np.float32)
    x, b, c = (draw(rng, tokens, *shape) for shape in ((HEADS, CHANNELS), *[(GROUPS, STATES)] * 2))
    return x, steps, b, c


def looped(x, steps, b, c, state) -> tuple[np.ndarray, np.ndarray]:
    x, steps, b, c, state = (np.asarray(a, np.float64) for a in (x, steps, b, c, state))
    b, c = (np.repeat(a, HEADS // GROUPS, 1) for a in (b, c))
    outputs = []
    for t in range(len(x)):
        added = steps[t][:, None, None] * x[t][..., None] * b[t][:, None]
        state = np.exp(-steps[t])[:, None, None] * state + added
        outputs.append(np.einsum("hps,hs->hp", state, c[t]))
    return np.array(outputs).reshape(x.shape), state


def padded(rows: list, form: str) -> jax.Array:
    """An array of all sequences whose padding is NaN."""
    rest = rows[0].shape[1:]
    if form == "varlen":
        return jnp.concatenate([*rows, np.full((3, *rest), np.nan, np.float32)])
    empty = np.full((40, *rest), np.nan, np.float32)
    return jnp.stack([jnp.concatenate([row, empty[len(row) :]]) for row in rows])


def real(y, form: str) -> list:
    if form == "varlen":
        return np.split(np.asarray(y)[: sum(COUNTS)], np.cumsum(COUNTS)[:-1])
    return [np.asarray(row)[:count] for row, count in zip(y, COUNTS, strict=True)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 16)


@pytest.mark.parametrize("form", ["padded", "varlen"])
@pytest.mark.parametrize("decays", ["usual", "near 1", "near 0", "mixed"])
def test_real_tokens_and_states_are_those_of_a_loop(form, decays):
    rng = np.random.default_rng(0)
    rows = [sequence(rng, count, decays) for count in COUNTS]
    state = draw(rng, 4, HEADS, CHANNELS, STATES)
    x, steps, b, c = (padded(list(each), form) for each in zip(*rows, strict=True))
    y, after = state_space_scan(x, steps, -np.ones(HEADS), b, c, state, np.array(COUNTS))
    assert (y.dtype, after.dtype) == ("float32", "float32")
    for found, last, row, before in zip(real(y, form), after, rows, state, strict=True):
        x, steps, b, c = row
        expected, kept = looped(x, steps, b, c, before)
        scale = max(np.abs(expected).max(initial=0), np.abs(kept).max())
        np.testing.assert_allclose(found, expected, atol=2e-6 * scale)
        np.testing.assert_allclose(last, kept, atol=2e-6 * scale)


def test_a_long_prompt_and_its_pieces_are_one_sequence():
    rng = np.random.default_rng(1)
    x, steps, b, c = sequence(rng, 4096, "near 1")
    expected, last = looped(x, steps, b, c, np.zeros((HEADS, CHANNELS, STATES)))
    whole = [array[None] for array in (x, steps, b, c)]
    rates, state, found, begin = -np.ones(HEADS), None, [], 0
    for end in (1, 2, 130, 4096):
        x, steps, b, c = (array[:, begin:end] for array in whole)
        y, state = state_space_scan(x, steps, rates, b, c, state)
        found.append(y[0])
        begin = end
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5 * scale)
    np.testing.assert_allclose(state[0], last, atol=1e-5 * np.abs(last).max())


@pytest.mark.parametrize("form", ["padded", "varlen"])
def test_gradients_are_those_of_a_loop_and_padding_has_none(form):
    rng = np.random.default_rng(2)
    rows = [sequence(rng, count, "mixed") for count in COUNTS]
    states, rates = draw(rng, 4, HEADS, CHANNELS, STATES), -rng.uniform(0.5, 1, HEADS)
    weights = draw(rng, HEADS, CHANNELS)

    def chunked(rows, states, rates):
        x, steps, b, c = (padded(list(each), form) for each in zip(*rows, strict=True))
        y, after = state_space_scan(x, steps, rates, b, c, states, jnp.array(COUNTS))
        if form == "padded":
            y = jnp.concatenate([row[:count] for row, count in zip(y, COUNTS, strict=True)])
        return (y[: sum(COUNTS)].sum(0) * weights).sum() + (after**2).sum()

    def plain(rows, states, rates):
        total = 0.0
        for (x, steps, b, c), state in zip(rows, states, strict=True):

            def advance(state, token):
                x, step, b, c = token
                b, c = (jnp.repeat(each, HEADS // GROUPS, 0) for each in (b, c))
                added = (step[:, None] * x)[..., None] * b[:, None]
                state = jnp.exp(step * rates)[:, None, None] * state + added
                return state, jnp.einsum("hps,hs->hp", state, c)

            last, y = jax.lax.scan(advance, state, (x, steps, b, c))
            total += (y.sum(0) * weights).sum() + (last**2).sum()
        return total

    found, expected = (
        jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2)))(rows, states, rates))
        for loss in (chunked, plain)
    )
    for one, other in zip(found, expected, strict=True):
        scale = np.abs(other).max(initial=0)
        np.testing.assert_allclose(one, other, atol=2e-5 * scale)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.ones((9, 6), "f4")}, r"x is .*: expected \[batch, tokens, heads, channels\]"),
        ({"rates": np.ones(3, "f4")}, r"rates is .*: expected \(4,\)"),
        ({"b": np.ones((2, 9, 3, 5), "f4")}, "with a divisor of 4 as groups"),
        ({"state": np.ones((2, 4, 5, 6), "f4")}, r"state is .*: expected .* is \(2, 4, 6, 5\)"),
        ({"counts": np.array([10, 1])}, r"counts are \[10, 1\]: expected 0 to 9"),
        ({"x": np.ones((9, 4, 6), "f4")}, "counts is None: expected those of varlen x"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    x, steps, b, c = (a[None].repeat(2, 0) for a in sequence(np.random.default_rng(3), 9, "usual"))
    arguments = {"x": x, "steps": steps, "rates": -np.ones(HEADS, "f4"), "b": b, "c": c} | wrong
    with pytest.raises(ValueError, match=message):
        state_space_scan(**arguments)
