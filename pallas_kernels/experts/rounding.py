"""Rounds each row of x to the 4- and 8-bit blocks of the expert that multiplies it (W4Ax)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.experts.tiles import Tiles
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise import blocks as kernels
from mpjax.kernels.rowwise.api import quantize_rows


def are_alike(blocks: ActivationBlocks) -> bool:
    """Whether all experts have the same widths and the same order of channels."""
    return blocks.bits is None and blocks.permutation is None


def round_to_blocks(
    x: jax.Array,
    blocks: ActivationBlocks,
    experts: jax.Array | None,
    sources: jax.Array | None = None,
) -> QuantizedActivations:
    """The rows of x [rows of x, K] rounded to the blocks of their experts: [rows, K].

    If experts are alike, each row of x is rounded once: [rows of x, K].

    blocks: of a stack, with bits [experts, blocks] and a permutation [experts, K], or None.
    experts: int32 [rows], the expert of each row; below 0 for any. None if experts are alike.
    sources: int32 [rows], the row of x for each result row, if experts are not alike. None: each
        row of x has equally many consecutive result rows.
    """
    if are_alike(blocks):
        return quantize_rows(x, blocks)
    assert experts is not None
    is_half = x.dtype in (jnp.bfloat16, jnp.float16)
    if x.size and is_half and device.why_triton_cannot_run() is None:
        return kernels.quantize_rows_of_experts(x, blocks, experts, sources)
    return reference(x, blocks, experts, sources)


def reference(
    x: jax.Array, blocks: ActivationBlocks, experts: jax.Array, sources: jax.Array | None = None
) -> QuantizedActivations:
    """`round_to_blocks` in plain jnp, for experts whose orders or widths of channels differ."""
    if sources is None:
        rows = jnp.repeat(x, len(experts) // max(len(x), 1), axis=0)
    else:
        rows = jnp.take(x, sources, axis=0)

    def rounded(row: jax.Array, expert: jax.Array) -> QuantizedActivations:
        own = jax.tree.map(lambda array: array[expert], blocks)
        return quantize_activations(row, own)

    found = jax.vmap(rounded)(rows, jnp.maximum(experts, 0))
    return dataclasses.replace(found, is_permuted=blocks.permutation is not None)


def has_own_blocks(weight: Any) -> bool:
    """Whether a stack is packed, and its experts round rows to different blocks."""
    blocks = weight.activations if isinstance(weight, QuantizedTensor) else None
    return isinstance(blocks, ActivationBlocks) and not are_alike(blocks)


def round_in_tiles(
    x: jax.Array, weight: Any, tiles: Tiles, of_rows: jax.Array
) -> tuple[QuantizedActivations, Any]:
    """The rows of x [tokens, K] in the order of tiles, and the weight without a permutation.

    of_rows: int32, the expert of each row in the order of tiles.
    """
    assert tiles.pairs is not None
    # The pairs of unused tiles are uninitialised memory.
    sources = jnp.clip(tiles.pairs.reshape(-1) // (tiles.count // len(x)), 0, len(x) - 1)
    rounded = round_to_blocks(x, weight.activations, of_rows, sources)
    return rounded, dataclasses.replace(weight, permutation=None)
