"""Attention outputs rounded to activation blocks of 128 channels when they are stored.

Each block is inside one head, so that the program with a head's outputs can compute the block's
scale. With a permutation, a block would have channels of several heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.activation_blocks import BLOCK, FORMAT, ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.launch import load_masked, store
from mpjax.kernels.rowwise.blocks import factors_of, round_to_codes


def can_round(blocks: ActivationBlocks, head_dim: int) -> bool:
    """Whether each block is inside one head, without a permutation of channels."""
    return blocks.permutation is None and head_dim % BLOCK == 0


class Places(NamedTuple):
    """The token and head of each row [rows], and the block inside the head, the same for all."""

    token: jax.Array
    head: jax.Array
    part: Any  # the block's index in its head
    mask: jax.Array | None


Tile = tuple[jax.Array, jax.Array]  # float32 [rows, channels], and the channels' indices in a head


class RoundedHeads(NamedTuple):
    """The codes and scales of attention's outputs: arrays outside of a kernel, references inside.

    codes: int8 [tokens, heads, head dim]. scales: float32 [heads · blocks of a head, tokens], the
    order in which products load them.
    """

    codes: Any
    scales: Any

    @classmethod
    def shapes(cls, tokens: int, heads: int, dim: int) -> RoundedHeads:
        """The ShapeDtypeStructs of a result."""
        return cls(
            jax.ShapeDtypeStruct((tokens, heads, dim), FORMAT.dtype),
            jax.ShapeDtypeStruct((heads * dim // BLOCK, tokens), jnp.float32),
        )

    def activations(self, leading: tuple[int, ...], dtype: jnp.dtype) -> QuantizedActivations:
        """The concatenated outputs [leading axes, heads · head dim] of all heads."""
        codes, scales = self.codes.reshape(*leading, -1), self.scales.T.reshape(*leading, -1)
        return QuantizedActivations(codes, scales, jnp.dtype(dtype).name)

    def store(self, bits: Any, tiles: Sequence[Tile], rows: Places) -> None:
        """Stores the values of one block in each row; inside a kernel.

        bits: a reference to the blocks' widths, or None. tiles: all channels of the blocks.
        """
        token, head, part, mask = rows
        block = head * (self.codes.shape[2] // BLOCK) + part
        top = jnp.full(token.shape, 127.0, jnp.float32)
        if bits is not None:
            top = jnp.where(load_masked(bits.at[block], mask) == 4, jnp.float32(7), top)
        factors, peaks = factors_of([wide for wide, _ in tiles], top)
        for wide, channel in tiles:
            codes = round_to_codes(wide, factors).astype(self.codes.dtype)
            place = self.codes.at[token[:, None], head[:, None], channel[None, :]]
            full = None if mask is None else jnp.broadcast_to(mask[:, None], codes.shape)
            store(place, codes, mask=full)
        store(self.scales.at[block, token], peaks * (1 / top), mask=mask)
