"""The search as Triton kernels, one for each round; programs divide a row.

A row of 151,936 logits is too long for one multiprocessor, and programs can't wait for each other.
So each round is a kernel whose programs store the sums of their parts of a row for the next round:
there, each program adds them up, which gives the round's digit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.thresholds.keys import BITS, DIGITS, LEAST, ROUNDS, key_of, number_of

TILE, WARPS = 512, 4  # numbers that a program loads at once: 16 bytes per thread
PROGRAMS = 8  # of all rows, per multiprocessor
MOST_PARTS = 128  # programs of a row, each of which loads the sums of all of them


@functools.partial(jax.jit, static_argnames="interpret")
def threshold(
    numbers: jax.Array,
    wanted: jax.Array,
    weights: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The threshold of each row; see the public function. wanted: int32 [rows, 1]."""
    rows, size = numbers.shape
    parts = parts_of(rows, size)
    found = jnp.full(rows, LEAST, jnp.int32)
    sums = jnp.zeros((rows, parts, DIGITS), jnp.int32)
    for shift in range(BITS * (ROUNDS - 1), -1, -BITS):
        shifts = jnp.full(1, shift, jnp.int32)
        state = wanted[:, 0], found, sums, shifts
        found, sums = _round(numbers, weights, *state, interpret=interpret)
    digit = (sums.sum(1) >= wanted).sum(-1, dtype=jnp.int32)
    return jnp.where(wanted > 0, number_of(found + digit)[:, None], -jnp.inf)


def parts_of(rows: int, size: int) -> int:
    """The number of programs that share a row, a power of two."""
    share = PROGRAMS * device.multiprocessors() // max(1, rows)
    parts = min(MOST_PARTS, max(1, share), pl.cdiv(size, TILE))
    return 1 << (parts.bit_length() - 1)


# With its own `jit`, the kernel is traced and compiled once for all rounds.
@functools.partial(jax.jit, static_argnames="interpret")
def _round(
    numbers: jax.Array,
    weights: jax.Array | None,
    *state: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The keys after the previous round, and the sums of this round.

    state: the wanted weight int32 [rows], the key int32 [rows] before the previous round, that
    round's sums int32 [rows, parts, DIGITS], and the shift int32 [1] of this round's digit.
    """
    _, found, sums, _ = state
    shapes = (
        jax.ShapeDtypeStruct(found.shape, jnp.int32),
        jax.ShapeDtypeStruct(sums.shape, jnp.int32),
    )
    results: tuple[jax.Array, jax.Array] = launch(
        _kernel,
        (numbers, weights, *state),
        out_shape=shapes,
        grid=sums.shape[:2],
        settings=Settings("threshold", warps=WARPS),
        interpret=interpret,
    )
    return results


def _kernel(inputs: Any, found_ref: Any, sums_ref: Any) -> None:
    numbers_ref, weights_ref, wanted_ref, known_ref, before_ref, shift_ref = inputs
    row, part = first_program_id(), pl.program_id(1)
    size, parts = numbers_ref.shape[1], sums_ref.shape[1]
    wanted, shift = load(wanted_ref.at[row]), load(shift_ref.at[jnp.int32(0)])
    index = jnp.arange(parts)[:, None], jnp.arange(DIGITS)[None, :]
    before = load(before_ref.at[row, *index]).sum(0)
    digit = (before >= wanted).astype(jnp.int32).sum()
    # Two shifts: before the first round, the digit is 0, and its shift would be 32.
    found = load(known_ref.at[row]) + ((digit << shift) << BITS)
    tiles = pl.cdiv(pl.cdiv(size, TILE), parts)

    def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        place = (part * tiles + step) * TILE + jnp.arange(TILE)
        mask = None if size == tiles * parts * TILE else place < size
        keys = key_of(load_masked(numbers_ref.at[row, place], mask))
        if weights_ref is None:
            weights = jnp.ones(TILE, jnp.int32)
            weights = weights if mask is None else mask.astype(jnp.int32)
        else:
            weights = load_masked(weights_ref.at[row, place], mask)
        return tuple(
            total + jnp.where(keys >= found + (jnp.int32(candidate) << shift), weights, 0)
            for candidate, total in enumerate(sums, 1)
        )

    # A row that is not searched has no tiles.
    zeros = (jnp.zeros(TILE, jnp.int32),) * (DIGITS - 1)
    sums = jax.lax.fori_loop(0, tiles * jnp.clip(wanted, 0, 1), add, zeros)
    store(found_ref.at[row], found)
    for candidate, total in enumerate((jnp.zeros(TILE, jnp.int32), *sums)):
        store(sums_ref.at[row, part, jnp.int32(candidate)], total.sum())
