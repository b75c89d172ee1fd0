"""The gated delta rule in NumPy's float64, token by token, and inputs for it."""

from __future__ import annotations

import numpy as np

from mpjax.kernels import DeltaInputs


def recurrence(inputs: DeltaInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One sequence: inputs [tokens, ...], state [value heads, K, V]; outputs and the last state."""
    query, key, value, decay, rate = (np.asarray(x, np.float64) for x in vars(inputs).values())
    group = value.shape[1] // key.shape[1]
    size = key.shape[-1]
    query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    query, key = (np.repeat(x, group, 1) for x in (query / size**0.5, key))
    state, outputs = np.array(state, np.float64), np.zeros(value.shape)
    for t in range(len(value)):
        state *= np.exp(decay[t]).reshape(len(state), -1, 1)
        error = rate[t][:, None] * (value[t] - np.einsum("hk,hkv->hv", key[t], state))
        state += key[t][:, :, None] * error[:, None]
        outputs[t] = np.einsum("hk,hkv->hv", query[t], state)
    return outputs, state


def draw(
    rng: np.random.Generator,
    tokens: int,
    sizes=(2, 6, 16, 8),
    gates="usual",
    *,
    by_channel: bool = False,
) -> DeltaInputs:
    """Random inputs [tokens, ...] for sizes (key heads, value heads, K, V).

    by_channel: whether each key channel has a decay.

    gates: `usual`; `kept` and `forgotten`, with decays near 1 and near 0; or `mixed`, in which some
    tokens forget all, keys repeat, and rates are 0 or 1.
    """
    key_heads, heads, size, width = sizes
    query, key = rng.normal(size=(2, tokens, key_heads, size))
    value = rng.normal(size=(tokens, heads, width))
    decay = -rng.exponential(size=(tokens, heads, size) if by_channel else (tokens, heads))
    rate = rng.uniform(size=(tokens, heads))
    if gates == "kept":
        decay *= 1e-4
    if gates == "forgotten":
        decay -= 200
    if gates == "mixed":
        decay = np.where(rng.uniform(size=decay.shape) < 0.1, -3e38, decay * 1e-3)
        key[:] = key[:1] + 0.01 * key
        rate = (rate < 0.9).astype(float)
    arrays = (x.astype(np.float32) for x in (query, key, value, decay, rate))
    return DeltaInputs(*arrays)
