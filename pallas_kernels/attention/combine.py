"""Joins the results of programs that each saw a part of the keys (FlashDecoding)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend

FLOOR = -1e30  # below any score, and finite, so that what has no visible keys makes no NaN
ELEMENTS, LEAST_CHANNELS = 2048, 32  # of a program: many splits of a few heads are read by more


def combine(outputs: jax.Array, sums: jax.Array, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """The mean of outputs by the weights of which `sums` are log2: [tokens, heads, dim].

    outputs: float32 [tokens, heads, splits, dim]; sums: float32 [tokens, heads, splits], FLOOR
    where a part saw no key. dtype: of the result.
    """
    tokens, heads, splits, dim = outputs.shape
    most = max(ELEMENTS // pl.next_power_of_2(splits), LEAST_CHANNELS)
    channels = min(1 << most.bit_length() - 1, pl.next_power_of_2(dim))
    return backend.pallas_call(
        functools.partial(_kernel, channels=channels),
        outputs,
        sums,
        out_shape=jax.ShapeDtypeStruct((tokens, heads, dim), dtype),
        grid=(tokens, heads, pl.cdiv(dim, channels)),
        name="attention_combine",
        warps=4,
        stages=1,
        interpret=interpret,
    )


def _kernel(outputs_ref: Any, sums_ref: Any, out_ref: Any, *, channels: int) -> None:
    token, head = backend.first_program_id(), pl.program_id(1)
    splits, dim = outputs_ref.shape[2:]
    split = jnp.arange(pl.next_power_of_2(splits))
    lane = pl.program_id(2) * channels + jnp.arange(channels)
    mask = split < splits
    sums = backend.load(sums_ref.at[token, head, split], mask=mask, other=FLOOR)
    weights = jnp.where(mask, jnp.exp2(sums - sums.max()), 0.0)
    parts = backend.load_masked(
        outputs_ref.at[token, head, split[:, None], lane[None, :]],
        mask[:, None] & (lane < dim)[None, :],
    )  # [splits, dim]
    joined = (parts * weights[:, None]).sum(0) / weights.sum()
    backend.store(out_ref.at[token, head, lane], joined.astype(out_ref.dtype), mask=lane < dim)
