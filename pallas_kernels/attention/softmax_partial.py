"""The softmax of a tile of rows over a part of their keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.attention.combine import FLOOR
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.attention.rounding import Places, RoundedHeads
from mpjax.kernels.attention.rows import Rows
from mpjax.kernels.attention.tiles import Part
from mpjax.kernels.launch import store


@dataclasses.dataclass(frozen=True)
class SoftmaxPartial:
    """A main loop's partial softmax over some keys, which is continued by another loop, or stored.

    With weights w = 2**(score · log2 e − base) of these keys, `total` is Σ w and `sums` are
    Σ w · value, for each row. All are float32.
    """

    sums: tuple[jax.Array, ...]  # a tile of channels and rows for each part of the channels
    total: jax.Array  # [rows]
    base: jax.Array  # [rows]
    parts: Sequence[Part]  # of a value's channels
    rows: Rows
    oriented: Orientation

    @property
    def _divisor(self) -> jax.Array:
        """The totals, but 1 for rows without keys, whose outputs must be finite."""
        return jnp.where(self.total == 0, 1.0, self.total)

    def store_rounded(self, out_ref: RoundedHeads, bits_ref: Any) -> None:
        """Stores normalised outputs rounded to blocks, each of which is a whole head.

        bits_ref: the bits of the blocks, or None.
        """
        divisor, tiles = self._divisor, []
        for part, sums in zip(self.parts, self.sums, strict=True):
            out = sums / self.oriented.for_rows(divisor)
            channel, _ = part.channels()
            tiles.append((out.T if self.oriented.few_rows else out, channel))
        rows = self.rows
        out_ref.store(bits_ref, tiles, Places(rows.token, rows.query_head, 0, rows.mask))

    def store(self, out_ref: Any, log2_totals_ref: Any, program: Any, shift: Any = 0) -> None:
        """Stores normalised outputs, and log2 of the weights' totals, for each row.

        out_ref: [tokens, query heads, programs, head dim].
        log2_totals_ref: [tokens, query heads, programs], or None. FLOOR stands for no keys.
        program: the index along the axis of programs.
        shift: a number added to the rows' tokens.
        """
        rows = self.rows._replace(token=self.rows.token + shift)
        divisor = self._divisor
        for part, sums in zip(self.parts, self.sums, strict=True):
            out = sums / self.oriented.for_rows(divisor)
            (token, query_head, channel), mask = rows.locate(part)
            target = out_ref.at[token, query_head, program, channel]
            mask = jnp.broadcast_to(mask, target.shape)
            out = out.T if self.oriented.few_rows else out
            store(target, out.astype(out_ref.dtype), mask=mask)
        if log2_totals_ref is not None:
            log2_total = jnp.where(self.total == 0, FLOOR, self.base + jnp.log2(divisor))
            target = log2_totals_ref.at[rows.token, rows.query_head, program]
            store(target, log2_total, mask=rows.mask)
