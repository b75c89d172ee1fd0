"""Joins the results of programs that each saw a part of the keys (FlashDecoding)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store

FLOOR = -1e30  # below any score, and finite, so that what has no visible keys makes no NaN
# Of a program. Many splits of a few heads are read by more programs, which share a head's channels;
# a few splits of so many heads that programs would do next to nothing, by fewer.
ELEMENTS, LEAST_CHANNELS, ENOUGH_PROGRAMS = 1024, 32, 1024
ELEMENTS_PER_WARP = 2048  # a single warp adds splits up in its registers
MANY_PARTS = 32  # at a time, where their number is not known before


class Parts(NamedTuple):
    """What programs found; or, if balanced, all of them in one order, and where they are in it."""

    outputs: Any  # [tokens, heads, programs, dim], or [programs, heads, 1, dim]
    sums: Any  # of weights, their log2: [tokens, heads, programs], or [programs, heads, 1]
    firsts: Any = None  # int32 [batch]: the first part that is of no own program, or -1
    lasts: Any = None  # int32 [batch]: and the last one, if there is one
    whole: Any = None  # [batch, heads, 1, dim] outputs of sequences with a single program, or None


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
    joined = launch(
        functools.partial(_kernel, rows=rows, channels=channels),
        outputs.reshape(-1, splits, dim),
        sums.reshape(-1, splits),
        out_shape=jax.ShapeDtypeStruct((tokens * heads, dim), dtype),
        grid=(pl.cdiv(tokens * heads, rows), pl.cdiv(dim, channels)),
        settings=Settings(
            "attention_combine", warps=max(1, rows * slots * channels // ELEMENTS_PER_WARP)
        ),
        interpret=interpret,
    )
    return joined.reshape(tokens, heads, dim)


def _kernel(outputs_ref: Any, sums_ref: Any, out_ref: Any, *, rows: int, channels: int) -> None:
    count, splits, dim = outputs_ref.shape
    row = first_program_id() * rows + jnp.arange(rows)
    split = jnp.arange(pl.next_power_of_2(splits))
    lane = pl.program_id(1) * channels + jnp.arange(channels)
    inside = (row < count)[:, None] & (lane < dim)[None, :]
    mask = (row < count)[:, None] & (split < splits)[None, :]
    sums = load(sums_ref.at[row[:, None], split[None, :]], mask=mask, other=FLOOR)
    weights = jnp.where(mask, jnp.exp2(sums - sums.max(1, keepdims=True)), 0.0)  # [rows, splits]
    parts = load_masked(
        outputs_ref.at[row[:, None, None], split[None, :, None], lane[None, None, :]],
        mask[:, :, None] & inside[:, None, :],
    )  # [rows, splits, channels]
    totals = weights.sum(1, keepdims=True)
    joined = (parts * weights[:, :, None]).sum(1) / jnp.where(row[:, None] < count, totals, 1.0)
    store(out_ref.at[row[:, None], lane[None, :]], joined.astype(out_ref.dtype), mask=inside)


def combine_balanced(
    parts: Parts, tokens: int, dtype: jnp.dtype, *, own: int, interpret: bool
) -> jax.Array:
    """The same of balanced parts, which stand in one order: first `own` of each sequence."""
    heads, dim = parts.outputs.shape[1::2]
    rows = tokens * heads
    is_large = rows >= ENOUGH_PROGRAMS
    channels = pl.next_power_of_2(dim) if is_large else LEAST_CHANNELS
    return launch(
        functools.partial(_balanced_kernel, own=own, channels=channels),
        parts,
        out_shape=jax.ShapeDtypeStruct((tokens, heads, 1, dim), dtype),
        aliases={} if parts.whole is None else {4: 0},
        # Of those that are whole, most programs find nothing to join.
        grid=(rows if parts.whole is None else min(rows, ENOUGH_PROGRAMS), pl.cdiv(dim, channels)),
        settings=Settings("attention_combine", warps=max(1, MANY_PARTS * channels // ELEMENTS)),
        interpret=interpret,
    )


def _balanced_kernel(parts: Parts, out_ref: Any, *, own: int, channels: int) -> None:
    tokens, heads, _, dim = out_ref.shape
    longest = tokens // parts.firsts.shape[0]
    lane = pl.program_id(1) * channels + jnp.arange(channels)

    def join(row: jax.Array, first: jax.Array, count: jax.Array) -> None:
        token, head = row // heads, row % heads

        def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            joined, total, peak = carry
            number = step * MANY_PARTS + jnp.arange(MANY_PARTS)
            mask = number < count
            is_own = number < own
            slot = jnp.where(is_own, token // longest * own + number, first + number - own)
            place = slot * longest + token % longest
            sums = load(parts.sums.at[place, head, 0], mask=mask, other=FLOOR)
            new_peak = jnp.maximum(peak, sums.max())
            weights = jnp.where(mask, jnp.exp2(sums - new_peak), 0.0)
            outputs = load_masked(
                parts.outputs.at[place[:, None], head, 0, lane[None, :]],
                mask[:, None] & (lane < dim)[None, :],
            )  # [parts, channels]
            shrink = jnp.exp2(peak - new_peak)
            joined = joined * shrink + (outputs * weights[:, None]).sum(0)
            return joined, total * shrink + weights.sum(), new_peak

        carry = jnp.zeros(channels), jnp.float32(0), jnp.float32(FLOOR)
        steps = pl.cdiv(count, MANY_PARTS)
        joined, total, _ = jax.lax.fori_loop(0, steps, add, carry)
        joined = (joined / total).astype(out_ref.dtype)
        store(out_ref.at[token, head, 0, lane], joined, mask=lane < dim)

    # The heads of a token go to different programs, for a few tokens may be all that is joined.
    programs, begin = pl.num_programs(0), first_program_id()

    def see(number: jax.Array, _: None) -> None:
        row = begin + number * programs
        sequence = row // heads // longest
        first, last = (load(x.at[sequence]) for x in (parts.firsts, parts.lasts))
        count = own + jnp.where(first < 0, 0, last - first + 1)
        if parts.whole is None:
            join(row, first, count)
        else:
            pl.when(first >= 0)(lambda: join(row, first, count))

    jax.lax.fori_loop(0, pl.cdiv(tokens * heads - begin, programs), see, None)
