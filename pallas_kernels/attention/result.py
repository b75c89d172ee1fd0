"""What a main loop found of the keys that it read: another goes on from it, or it is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.attention.combine import FLOOR
from mpjax.kernels.attention.orientation import Orientation
from mpjax.kernels.attention.rows import Rows
from mpjax.kernels.attention.tiles import Part
from mpjax.kernels.launch import store


@dataclasses.dataclass(frozen=True)
class Result:
    """Weights, which are 2**(exponent − base), summed for each row; and values times them."""

    sums: tuple[jax.Array, ...]  # for each part, like a tile of its channels
    total: jax.Array  # [rows]
    base: jax.Array  # [rows]
    parts: Sequence[Part]
    rows: Rows
    oriented: Orientation

    def store(self, out_ref: Any, sums_ref: Any, place: Any, shift: Any = 0) -> None:
        """Outputs, and log2 of totals if wanted, at a place and the rows' tokens, plus a shift."""
        oriented = self.oriented
        rows = self.rows._replace(token=self.rows.token + shift)
        # A program without keys has weight zero, and its output must be a number all the same.
        divisor = jnp.where(self.total == 0, 1.0, self.total)
        for part, of_part in zip(self.parts, self.sums, strict=True):
            out = of_part / oriented.for_rows(divisor)
            (token, query_head, channel), mask = rows.locate(part)
            target = out_ref.at[token, query_head, place, channel]
            mask = jnp.broadcast_to(mask, target.shape)
            out = out.T if oriented.few_rows else out
            store(target, out.astype(out_ref.dtype), mask=mask)
        if sums_ref is not None:
            log2_total = jnp.where(self.total == 0, FLOOR, self.base + jnp.log2(divisor))
            target = sums_ref.at[rows.token, rows.query_head, place]
            store(target, log2_total, mask=rows.mask)
