"""The gated activation of a product with the change of adapters, as a Triton kernel.

It takes the place of *expand*, which would read and write all terms of gate and up before the
activation reads them again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.launch import Settings, first_program_id, launch, load_masked
from mpjax.kernels.low_rank.triton import (
    STEP_ROWS,
    Factors,
    for_adapters,
    programs_of,
    store_tile,
)
from mpjax.kernels.rowwise.triton import activated

OUTPUTS = 128  # of a program


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def gated(
    terms: jax.Array,
    inner: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    activation: str,
    interpret: bool = False,
) -> jax.Array:
    """activation(gate) · up [rows, I] of the terms [splits, rows, 2 · I] with the rows' changes.

    inner: float32 [parts, rows, 2 · rank]. ups: of gate and up [places, rank, I]. adapters: int32
    [rows], 0 for none. The result has the dtype of ups.
    """
    rows, channels = len(adapters), ups[0].shape[2]
    found: jax.Array = launch(
        functools.partial(_gated, activation=activation),
        (terms, inner, tuple(ups), adapters),
        out_shape=jax.ShapeDtypeStruct((rows, channels), ups[0].dtype),
        grid=(pl.cdiv(channels, OUTPUTS), programs_of(adapters, STEP_ROWS)),
        settings=Settings("adapter_gated", warps=1 if rows <= STEP_ROWS else 4),
        interpret=interpret,
    )
    return found


def _gated(inputs: Any, found_ref: Any, *, activation: str) -> None:
    terms_ref, inner_ref, up_refs, adapters = inputs
    (rows, channels), splits = found_ref.shape, range(terms_ref.shape[0])
    output = first_program_id() * OUTPUTS + jnp.arange(OUTPUTS)
    maps = [
        Factors(inner_ref, up_ref, number, number * channels, output, all_rows=True)
        for number, up_ref in enumerate(up_refs)
    ]

    def activate(adapter: jax.Array, row: jax.Array, has: jax.Array | None) -> None:
        loads = []
        for factors in maps:  # all loads before the first sum, so that none waits for another
            target, kept = factors.target(row, has)
            places = [terms_ref.at[(jnp.int32(split), *target)] for split in splits]
            terms = [load_masked(place, kept) for place in places]
            loads.append((terms, factors.load(adapter, row, has)))
        gate, up = (
            sum(term.astype(jnp.float32) for term in terms) + factors.product(loaded, row)
            for factors, (terms, loaded) in zip(maps, loads, strict=True)
        )
        target, kept = maps[0].target(row, has)
        found = activated(gate, up, activation).astype(found_ref.dtype)
        store_tile(found_ref.at[target], found, kept)

    for_adapters(adapters, pl.program_id(1), rows, activate, most=STEP_ROWS, first=0)
