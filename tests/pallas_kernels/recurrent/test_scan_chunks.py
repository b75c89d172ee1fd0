"""Mamba2's kernel for prompts, against plain jnp, which is tested against a loop in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import state_space_scan
from mpjax.kernels.recurrent import scan, scan_chunks

COUNTS = np.array([70, 0, 1, 150])


def draw(tokens: int, decays: str, sizes: tuple[int, int, int, int] = (4, 2, 64, 32)):
    """x, steps, rates, b and c of (heads, groups, channels, states)."""
    heads, groups, channels, states = sizes
    rng = np.random.default_rng(0)
    x, b, c = (
        jnp.asarray(rng.normal(size=(tokens, *shape)), jnp.bfloat16)
        for shape in ((heads, channels), (groups, states), (groups, states))
    )
    steps = {
        "usual": rng.uniform(0, 1, (tokens, heads)),
        "kept": rng.uniform(0, 1e-4, (tokens, heads)),
        "forgotten": rng.uniform(50, 200, (tokens, heads)),
        # A decay of 0 among those near 1: sums from the begin would lose the small ones.
        "mixed": np.where(rng.random((tokens, heads)) < 0.1, 3e5, 1e-3),
    }[decays].astype(np.float32)
    return x, jnp.asarray(steps), -jnp.ones(heads), b, c


@jax.jit
def in_plain_jnp(x, steps, rates, b, c, state, counts):
    return scan.plain((x, steps, b, c), rates, state, counts)


def require_alike(found, expected, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel runs, interpreted."""
    run = functools.partial(scan_chunks.read, interpret=True)
    monkeypatch.setattr(scan_chunks, "read", run)
    monkeypatch.setattr("mpjax.kernels.device.why_triton_cannot_run", lambda: None)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("decays", ["usual", "mixed"])
def test_varlen_prompts_are_those_of_plain_jnp(decays):
    tokens = COUNTS.sum() + 5
    state = np.random.default_rng(1).normal(size=(4, 4, 64, 32)).astype(np.float32)
    given = *draw(tokens, decays), state, jnp.asarray(COUNTS)
    found, expected = jax.jit(state_space_scan)(*given), in_plain_jnp(*given)
    assert not np.asarray(found[0][-5:]).any()  # of padding
    require_alike(found, expected, 1e-6)


@pytest.mark.usefixtures("interpreted")
def test_padded_prompts_and_inputs_that_the_kernel_cannot_read():
    x, steps, rates, b, c = draw(2 * 20, "kept", (2, 1, 16, 16))
    x, steps, b, c = (each.reshape(2, 20, *each.shape[1:]) for each in (x, steps, b, c))
    given = x, steps, rates, b, c, jnp.ones((2, 2, 16, 16)), jnp.array([20, 20])
    require_alike(jax.jit(state_space_scan)(*given[:-1]), in_plain_jnp(*given), 1e-6)
    reason = scan_chunks.why_not(x.astype(jnp.float32), b, c)
    assert reason is not None
    assert "x, b and c are float32, bfloat16 and bfloat16" in reason


@pytest.mark.usefixtures("pretend_gpu")
def test_a_gpu_runs_the_kernel(lower_for_cuda):
    given = draw(96, "usual", (2, 1, 64, 128))
    program = lower_for_cuda(state_space_scan, *given, None, jnp.array([90]))
    assert 'name = "state_space_chunks"' in program


@pytest.mark.gpu
@pytest.mark.parametrize("decays", ["usual", "kept", "forgotten", "mixed"])
def test_long_prompts_on_a_gpu(decays):
    counts = jnp.array([3000, 1, 999])
    given = *draw(4000, decays, (8, 2, 64, 128)), jnp.zeros((3, 8, 64, 128)), counts
    require_alike(jax.jit(state_space_scan)(*given), in_plain_jnp(*given), 5e-6)
