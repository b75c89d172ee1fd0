"""The delta rule's kernels for prompts, against a recurrence in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import UnsupportedError, gated_delta_rule
from mpjax.kernels.recurrent import delta_chunks
from tests.pallas_kernels.recurrent.delta_oracle import draw, recurrence

COUNTS = np.array([70, 0, 1, 150])  # of which no chunk of the last but one is full
SIZES = (2, 4, 32, 64)  # two programs have the values of a head


def inputs_of(tokens: int, gates: str, sizes=SIZES, *, by_channel: bool = False):
    """Inputs whose queries and keys are in bfloat16."""
    found = draw(np.random.default_rng(0), tokens, sizes, gates, by_channel=by_channel)
    narrow = (jnp.asarray(x, jnp.bfloat16) for x in (found.query, found.key))
    return dataclasses.replace(found, **dict(zip(("query", "key"), narrow, strict=True)))


def require_alike(found, expected, scale: float, tolerance: float = 3e-5) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance * scale)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels run, interpreted."""
    run = functools.partial(delta_chunks.read, interpret=True)
    monkeypatch.setattr(delta_chunks, "read", run)
    monkeypatch.setattr("mpjax.kernels.device.why_triton_cannot_run", lambda: None)
    return jax.jit(functools.partial(gated_delta_rule, implementation="triton"))


ODD = (2, 4, 24, 40)  # which the kernels pad


@pytest.mark.parametrize(
    ("gates", "sizes", "by_channel"),
    [("mixed", SIZES, False), ("kept", ODD, False), ("mixed", SIZES, True), ("kept", ODD, True)],
)
def test_varlen_prompts_are_those_of_a_recurrence(gates, sizes, by_channel, interpreted):
    inputs = inputs_of(COUNTS.sum() + 5, gates, sizes, by_channel=by_channel)
    state = np.random.default_rng(1).normal(size=(4, *sizes[1:])).astype(np.float32)
    outputs, after = interpreted(inputs, state, jnp.asarray(COUNTS))
    assert np.isfinite(outputs).all()
    for row, (end, count) in enumerate(zip(np.cumsum(COUNTS), COUNTS, strict=True)):
        own = jax.tree.map(lambda x, end=end, count=count: x[end - count : end], inputs)
        expected, last = recurrence(own, state[row])
        scale = max(np.abs(expected).max(initial=0), np.abs(last).max())
        require_alike(outputs[end - count : end], expected, scale)
        require_alike(after[row], last, scale)


def test_errors_with_keys_near_one_direction(interpreted):
    """Without decay, and with rates of 1: inverses are largest where keys are alike."""
    inputs = inputs_of(128, "kept", (1, 2, 32, 32), by_channel=True)
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 32)) * (-1.0) ** np.arange(128)[:, None, None]
    key = jnp.asarray(key + 0.01 * rng.normal(size=(128, 1, 32)), jnp.bfloat16)
    rate, decay = np.ones_like(inputs.rate), np.zeros_like(inputs.decay)
    inputs = dataclasses.replace(inputs, key=key, rate=rate, decay=decay)
    outputs, [after] = interpreted(inputs, np.zeros((1, 2, 32, 32), np.float32), jnp.array([128]))
    expected, last = recurrence(inputs, np.zeros((2, 32, 32)))
    scale = max(np.abs(expected).max(), np.abs(last).max())
    require_alike(outputs, expected, scale, 2e-4)
    require_alike(after, last, scale, 2e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_padded_prompts_and_gradients_are_those_of_plain_jnp(by_channel, interpreted):
    flat = inputs_of(2 * 20, "usual", (1, 2, 16, 16), by_channel=by_channel)
    inputs = jax.tree.map(lambda x: jnp.asarray(x).reshape(2, 20, *x.shape[1:]), flat)
    state, counts = jnp.ones((2, 2, 16, 16)), jnp.array([20, 3])

    def loss(inputs, state, implementation):
        given = inputs, state, counts
        outputs, after = gated_delta_rule(*given, implementation=implementation)
        return (outputs[0] ** 2).sum() + (outputs[1, :3] ** 2).sum() + (after**3).sum()

    both = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    found, expected = (both(inputs, state, each) for each in ("triton", "reference"))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        # A gradient of bfloat16 numbers is rounded to bfloat16.
        is_narrow = one.shape == inputs.key.shape
        require_alike(one, other, np.abs(other).max(), 1e-2 if is_narrow else 1e-5)


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize(
    ("form", "by_channel"), [("padded", False), ("varlen", False), ("varlen", True)]
)
def test_a_gpu_runs_all_kernels(form, by_channel, lower_for_cuda):
    inputs = inputs_of(96, "usual", (1, 2, 128, 128), by_channel=by_channel)
    if form == "padded":
        inputs = jax.tree.map(lambda x: x[None], inputs)
    program = lower_for_cuda(gated_delta_rule, inputs, None, jnp.array([90]))
    for name in ("pairs", "invert", "chunks"):
        assert f'name = "gated_delta_{name}"' in program


def test_inputs_that_the_kernels_cannot_read_are_told(interpreted):
    with pytest.raises(UnsupportedError, match="query and key are float32 and float32"):
        interpreted(draw(np.random.default_rng(0), 9), None, jnp.array([9]))
    with pytest.raises(UnsupportedError, match="keys have 136 channels, and the kernels read 128"):
        interpreted(inputs_of(9, "usual", (1, 1, 136, 16)), None, jnp.array([9]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "by_channel"),
    [((2, 6, 128, 128), False), ((2, 6, 128, 128), True), ((6, 6, 96, 192), False)],
)
@pytest.mark.parametrize("gates", ["usual", "kept", "forgotten", "mixed"])
def test_long_prompts_on_a_gpu(gates, sizes, by_channel):
    inputs = inputs_of(4000, gates, sizes, by_channel=by_channel)
    counts = jnp.array([3000, 1, 999])
    found = jax.jit(gated_delta_rule)(inputs, None, counts)
    outputs, after = (np.asarray(x, np.float64) for x in found)
    for row, (begin, end) in enumerate(((0, 3000), (3000, 3001), (3001, 4000))):
        own = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], inputs)
        expected, last = recurrence(own, np.zeros(sizes[1:]))
        require_alike(outputs[begin:end], expected, np.abs(expected).max())
        require_alike(after[row], last, np.abs(last).max())
