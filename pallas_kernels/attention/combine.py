"""Joins the softmax partials of programs that each processed some of the keys (FlashDecoding)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activation_blocks import BLOCK, ActivationBlocks
from mpjax.kernels.attention.rounding import Places, RoundedHeads
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store

# The score if there is no key: below any score, and finite, so that rows without keys get no NaN.
FLOOR = -1e30
# A program processes a tile of splits × channels × rows. With many splits, programs divide the
# channels of a head, at least LEAST_CHANNELS each, so that there are more programs. With few splits
# and more rows than ENOUGH_PROGRAMS, a program takes several rows, since one is too little work.
ELEMENTS_PER_PROGRAM, LEAST_CHANNELS, ENOUGH_PROGRAMS = 1024, 32, 1024
ELEMENTS_PER_WARP = 2048  # few enough for one warp to add up in its registers
PARTIALS_AT_ONCE = 32  # loaded per step for a balanced row, which may have any number of them


class Partials(NamedTuple):
    """The softmax partials of all programs: normalised outputs and log2 of their weights' sums.

    If balanced, the partials of all tasks are in one array, by slot (`balance`); each takes as many
    rows as a sequence has new tokens. Only balanced partials have the three last fields.
    """

    outputs: Any  # [tokens, heads, programs, dim], or balanced [slots · tokens, heads, 1, dim]
    log2_totals: Any  # [tokens, heads, programs], or balanced [slots · tokens, heads, 1]
    first_pieces: Any = None  # int32 [batch], the slot of a sequence's first piece, or -1
    last_pieces: Any = None  # int32 [batch], the slot of its last piece, if it has any
    # [tokens, heads, 1, dim], the final outputs of sequences that one program processes alone; None
    # if several programs share every sequence.
    whole_outputs: Any = None


def combine(
    outputs: jax.Array,
    log2_totals: jax.Array,
    dtype: jnp.dtype,
    *,
    blocks: ActivationBlocks | None = None,
    interpret: bool,
) -> Any:
    """The mean of splits' outputs, weighted by 2**log2_totals: [tokens, heads, dim] in `dtype`.

    outputs: float32 [tokens, heads, splits, dim].
    log2_totals: float32 [tokens, heads, splits], FLOOR for a split without keys.
    blocks: if given, the result is rounded to them, as RoundedHeads; see `rounding.can_round`.
    """
    tokens, heads, splits, dim = outputs.shape
    slots = pl.next_power_of_2(splits)
    most = max(ELEMENTS_PER_PROGRAM // slots, LEAST_CHANNELS)
    channels = min(1 << most.bit_length() - 1, pl.next_power_of_2(dim))
    result: Any = jax.ShapeDtypeStruct((tokens * heads, dim), dtype)
    if blocks is not None:
        channels, result = BLOCK, RoundedHeads.shapes(tokens, heads, dim)
    rows = max(
        1, min(ELEMENTS_PER_PROGRAM // (slots * channels), tokens * heads // ENOUGH_PROGRAMS)
    )
    rows = 1 if is_batch_invariant() else 1 << rows.bit_length() - 1
    [joined] = launch(
        functools.partial(_kernel, rows=rows, channels=channels),
        outputs.reshape(-1, splits, dim),
        log2_totals.reshape(-1, splits),
        None if blocks is None else blocks.bits,
        out_shape=(result,),
        grid=(pl.cdiv(tokens * heads, rows), pl.cdiv(dim, channels)),
        settings=Settings(
            "attention_combine", warps=max(1, rows * slots * channels // ELEMENTS_PER_WARP)
        ),
        interpret=interpret,
    )
    return joined if blocks is not None else joined.reshape(tokens, heads, dim)


def _kernel(
    outputs_ref: Any,  # [rows of all programs, splits, dim]
    log2_totals_ref: Any,  # [rows of all programs, splits]
    bits_ref: Any,  # [blocks], or None
    out_ref: Any,  # [rows of all programs, dim], or RoundedHeads
    *,
    rows: int,
    channels: int,
) -> None:
    count, splits, dim = outputs_ref.shape
    row = first_program_id() * rows + jnp.arange(rows)
    split = jnp.arange(pl.next_power_of_2(splits))
    lane = pl.program_id(1) * channels + jnp.arange(channels)
    inside = (row < count)[:, None] & (lane < dim)[None, :]
    mask = (row < count)[:, None] & (split < splits)[None, :]
    logs = load(log2_totals_ref.at[row[:, None], split[None, :]], mask=mask, other=FLOOR)
    weights = jnp.where(mask, jnp.exp2(logs - logs.max(1, keepdims=True)), 0.0)  # [rows, splits]
    outputs = load_masked(
        outputs_ref.at[row[:, None, None], split[None, :, None], lane[None, None, :]],
        mask[:, :, None] & inside[:, None, :],
    )  # [rows, splits, channels]
    totals = weights.sum(1, keepdims=True)
    joined = (outputs * weights[:, :, None]).sum(1) / jnp.where(row[:, None] < count, totals, 1.0)
    if isinstance(out_ref, RoundedHeads):
        heads = out_ref.codes.shape[1]
        places = Places(row // heads, row % heads, pl.program_id(1), row < count)
        out_ref.store(bits_ref, [(joined, lane)], places)
        return
    store(out_ref.at[row[:, None], lane[None, :]], joined.astype(out_ref.dtype), mask=inside)


def combine_balanced(
    partials: Partials,
    tokens: int,
    dtype: jnp.dtype,
    *,
    own: int,
    blocks: ActivationBlocks | None = None,
    interpret: bool,
) -> Any:
    """The weighted mean of each row's balanced partials: [tokens, heads, 1, dim] in `dtype`.

    tokens: of all sequences. own: programs of one sequence, whose slots come first.
    blocks: if given, the result is rounded to them, as RoundedHeads, even rows that are final.
    """
    heads, dim = partials.outputs.shape[1::2]
    rows = tokens * heads
    is_large = rows >= ENOUGH_PROGRAMS
    channels = pl.next_power_of_2(dim) if is_large else LEAST_CHANNELS
    # Sequences that one program processed alone have final rows: few rows are left to join.
    programs = rows if partials.whole_outputs is None else min(rows, ENOUGH_PROGRAMS)
    result: Any = jax.ShapeDtypeStruct((tokens, heads, 1, dim), dtype)
    aliases = {} if partials.whole_outputs is None else {4: 0}
    if blocks is not None:
        channels, programs, aliases = BLOCK, rows, {}
        result = RoundedHeads.shapes(tokens, heads, dim)
    [joined] = launch(
        functools.partial(_balanced_kernel, own=own, channels=channels),
        partials,
        None if blocks is None else blocks.bits,
        out_shape=(result,),
        aliases=aliases,
        grid=(programs, pl.cdiv(dim, channels)),
        settings=Settings(
            "attention_combine", warps=max(1, PARTIALS_AT_ONCE * channels // ELEMENTS_PER_PROGRAM)
        ),
        interpret=interpret,
    )
    return joined


def _balanced_kernel(
    partials: Partials, bits_ref: Any, out_ref: Any, *, own: int, channels: int
) -> None:
    is_rounded = isinstance(out_ref, RoundedHeads)
    part = pl.program_id(1) if is_rounded else None
    tokens, heads, dim = (
        out_ref.codes.shape if is_rounded else out_ref.shape[:2] + out_ref.shape[3:]
    )
    longest = tokens // partials.first_pieces.shape[0]  # tokens of a sequence, with padding
    lane = pl.program_id(1) * channels + jnp.arange(channels)

    def round_to_blocks(wide: jax.Array, row: jax.Array) -> None:
        places = Places((row // heads)[None], (row % heads)[None], part, None)
        out_ref.store(bits_ref, [(wide[None], lane)], places)

    def round_whole(row: jax.Array) -> None:
        whole = load(partials.whole_outputs.at[row // heads, row % heads, 0, lane])
        round_to_blocks(whole.astype(jnp.float32), row)

    def join(row: jax.Array, first: jax.Array, count: jax.Array) -> None:
        token, head = row // heads, row % heads

        def add(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            joined, total, peak = carry
            number = step * PARTIALS_AT_ONCE + jnp.arange(PARTIALS_AT_ONCE)
            mask = number < count
            is_own = number < own
            slot = jnp.where(is_own, token // longest * own + number, first + number - own)
            place = slot * longest + token % longest
            logs = load(partials.log2_totals.at[place, head, 0], mask=mask, other=FLOOR)
            new_peak = jnp.maximum(peak, logs.max())
            weights = jnp.where(mask, jnp.exp2(logs - new_peak), 0.0)
            outputs = load_masked(
                partials.outputs.at[place[:, None], head, 0, lane[None, :]],
                mask[:, None] & (lane < dim)[None, :],
            )  # [partials, channels]
            shrink = jnp.exp2(peak - new_peak)
            joined = joined * shrink + (outputs * weights[:, None]).sum(0)
            return joined, total * shrink + weights.sum(), new_peak

        carry = jnp.zeros(channels), jnp.float32(0), jnp.float32(FLOOR)
        steps = pl.cdiv(count, PARTIALS_AT_ONCE)
        joined, total, _ = jax.lax.fori_loop(0, steps, add, carry)
        if is_rounded:
            round_to_blocks(joined / total, row)
            return
        joined = (joined / total).astype(out_ref.dtype)
        store(out_ref.at[token, head, 0, lane], joined, mask=lane < dim)

    # Neighbouring rows, the heads of a token, go to different programs: all rows that are left to
    # join may belong to a few tokens.
    programs, begin = pl.num_programs(0), first_program_id()

    def see(number: jax.Array, _: None) -> None:
        row = begin + number * programs
        sequence = row // heads // longest
        first, last = (load(x.at[sequence]) for x in (partials.first_pieces, partials.last_pieces))
        count = own + jnp.where(first < 0, 0, last - first + 1)
        if partials.whole_outputs is None:
            join(row, first, count)
        else:
            pl.when(first >= 0)(lambda: join(row, first, count))
            if is_rounded:
                pl.when(first < 0)(lambda: round_whole(row))

    jax.lax.fori_loop(0, pl.cdiv(tokens * heads - begin, programs), see, None)
