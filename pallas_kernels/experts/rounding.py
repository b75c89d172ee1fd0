"""Rounds each row of x to blocks of 4 and 8 bits: those of the expert that multiplies it (W4Ax)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.rowwise import blocks as kernels
from mpjax.kernels.rowwise.api import quantize_rows


def round_to_blocks(
    x: jax.Array, blocks: ActivationBlocks, experts: jax.Array
) -> QuantizedActivations:
    """The rows of x [rows of x, K] rounded to the blocks of experts: [rows, K].

    Where experts differ neither in widths nor in an order of channels, each row of x is rounded
    once: [rows of x, K].

    blocks: of a stack, with bits [experts, blocks] and a permutation [experts, K], or None.
    experts: int32 [rows], the expert of each row; below 0 for any. Neighbouring rows are of one row
        of x, as many as there are rows for each of x.
    """
    if blocks.bits is None and blocks.permutation is None:
        return quantize_rows(x, blocks)
    is_half = x.dtype in (jnp.bfloat16, jnp.float16)
    if x.size and is_half and device.why_triton_cannot_run() is None:
        return kernels.quantize_rows_of_experts(x, blocks, experts)
    return reference(x, blocks, experts)


def reference(x: jax.Array, blocks: ActivationBlocks, experts: jax.Array) -> QuantizedActivations:
    """The same in plain jnp, for experts that differ."""
    rows = jnp.repeat(x, len(experts) // max(len(x), 1), axis=0)

    def rounded(row: jax.Array, expert: jax.Array) -> QuantizedActivations:
        own = jax.tree.map(lambda array: array[expert], blocks)
        return quantize_activations(row, own)

    found = jax.vmap(rounded)(rows, jnp.maximum(experts, 0))
    return dataclasses.replace(found, is_permuted=blocks.permutation is not None)
