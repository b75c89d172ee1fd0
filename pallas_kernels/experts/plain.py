"""The program of a product with plain (16-bit) experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.experts.plans import PLAIN_CHANNELS
from mpjax.kernels.gemm.plans import TritonConfig
from mpjax.kernels.launch import load_masked
from mpjax.kernels.target import current_target


def steps_of(channels: int) -> int:
    """The number of steps of the loop over K."""
    return pl.cdiv(channels, PLAIN_CHANNELS)


class PlainProgram:
    """The loads, masks and steps over K of one program, with `gemm.triton.Program`'s interface.

    x: a reference to [rows, K]. matrix: a reference to [K, N]. tile: the rows [tile_m] and output
    channels [tile_n] of the program; rows beyond x load as zeros.
    """

    def __init__(
        self, x: Any, matrix: Any, config: TritonConfig, tile: tuple[jax.Array, jax.Array]
    ) -> None:
        self.x, self.matrix, self.target = x, matrix, current_target()
        self.row, self.output = tile
        self.split = pl.program_id(2)
        self.channels, outputs = matrix.shape
        self.row_mask = self.row < x.shape[0]
        self.output_mask = None if outputs % config.tile_n == 0 else self.output < outputs
        self.zeros = jnp.zeros((config.tile_n, config.tile_m), jnp.float32)

    def step(self, number: jax.Array, accumulator: jax.Array) -> jax.Array:
        """Adds the products of the step's input channels to the accumulator [tile_n, tile_m]."""
        channel = number * PLAIN_CHANNELS + jnp.arange(PLAIN_CHANNELS)
        weights = load_masked(
            self.matrix.at[channel[None, :], self.output[:, None]],
            self._mask(self.output_mask, channel),
        )
        rows = load_masked(
            self.x.at[self.row[:, None], channel[None, :]], self._mask(self.row_mask, channel)
        )
        return accumulator + self.target.dot(weights.astype(rows.dtype), rows, trans_b=True)

    def scaled(self, accumulator: jax.Array) -> jax.Array:
        """The sums unchanged: plain weights have no scales."""
        return accumulator

    def _mask(self, first: jax.Array | None, channel: jax.Array) -> jax.Array | None:
        """The mask of a tile, some of whose channels may be beyond K."""
        if self.channels % PLAIN_CHANNELS == 0:
            return first
        inside = (channel < self.channels)[None, :]
        return inside if first is None else first[:, None] & inside
