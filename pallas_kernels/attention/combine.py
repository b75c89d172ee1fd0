"""Joins the results of programs that each saw a part of the keys (FlashDecoding)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend

FLOOR = -1e30  # below any score, and finite, so that what has no visible keys makes no NaN
# Of a program. Many splits of a few heads are read by more programs, which share a head's channels;
# a few splits of so many heads that programs would do next to nothing, by fewer.
ELEMENTS, LEAST_CHANNELS, ENOUGH_PROGRAMS = 1024, 32, 1024
ELEMENTS_PER_WARP = 2048  # a single warp adds splits up in its registers


def combine(outputs: jax.Array, sums: jax.Array, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """The mean of outputs by the weights of which `sums` are log2: [tokens, heads, dim].

    outputs: float32 [tokens, heads, splits, dim]; sums: float32 [tokens, heads, splits], FLOOR
    where a part saw no key. dtype: of the result.
    """
    tokens, heads, splits, dim = outputs.shape
    slots = pl.next_power_of_2(splits)
    most = max(ELEMENTS // slots, LEAST_CHANNELS)
    channels = min(1 << most.bit_length() - 1, pl.next_power_of_2(dim))
    rows = max(1, min(ELEMENTS // (slots * channels), tokens * heads // ENOUGH_PROGRAMS))
    rows = 1 << rows.bit_length() - 1
    joined = backend.pallas_call(
        functools.partial(_kernel, rows=rows, channels=channels),
        outputs.reshape(-1, splits, dim),
        sums.reshape(-1, splits),
        out_shape=jax.ShapeDtypeStruct((tokens * heads, dim), dtype),
        grid=(pl.cdiv(tokens * heads, rows), pl.cdiv(dim, channels)),
        name="attention_combine",
        warps=max(1, rows * slots * channels // ELEMENTS_PER_WARP),
        stages=1,
        interpret=interpret,
    )
    return joined.reshape(tokens, heads, dim)


def _kernel(outputs_ref: Any, sums_ref: Any, out_ref: Any, *, rows: int, channels: int) -> None:
    count, splits, dim = outputs_ref.shape
    row = backend.first_program_id() * rows + jnp.arange(rows)
    split = jnp.arange(pl.next_power_of_2(splits))
    lane = pl.program_id(1) * channels + jnp.arange(channels)
    inside = (row < count)[:, None] & (lane < dim)[None, :]
    mask = (row < count)[:, None] & (split < splits)[None, :]
    sums = backend.load(sums_ref.at[row[:, None], split[None, :]], mask=mask, other=FLOOR)
    weights = jnp.where(mask, jnp.exp2(sums - sums.max(1, keepdims=True)), 0.0)  # [rows, splits]
    parts = backend.load_masked(
        outputs_ref.at[row[:, None, None], split[None, :, None], lane[None, None, :]],
        mask[:, :, None] & inside[:, None, :],
    )  # [rows, splits, channels]
    totals = weights.sum(1, keepdims=True)
    joined = (parts * weights[:, :, None]).sum(1) / jnp.where(row[:, None] < count, totals, 1.0)
    backend.store(
        out_ref.at[row[:, None], lane[None, :]], joined.astype(out_ref.dtype), mask=inside
    )
