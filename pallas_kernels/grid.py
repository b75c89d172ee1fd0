"""Grids: the values that the codes of a weight can choose from.

Every quantiser has two steps: it fits a grid to a weight, and it chooses codes. A search for better
ranges, or the compensation of errors, needs nothing else of a format.
"""

from __future__ import annotations

import dataclasses
import functools

import jax

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.codes.base import Parameters
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.plain_codes import PlainCodes, in_groups


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["parameters"], meta_fields=["format", "channels"]
)
@dataclasses.dataclass(frozen=True)
class Grid:
    """The parameters of a weight [K, N] in a format; a pytree.

    channels: K, its input channels.
    """

    format: WeightFormat
    channels: int
    parameters: Parameters

    def round(self, weight: jax.Array) -> PlainCodes:
        """The nearest codes of a weight float32 [K, N]."""
        groups = in_groups(weight, self.format)
        codes = code_kinds.of(self.format).nearest(groups, self.parameters.of_groups())
        return self.with_codes(codes.reshape(-1, weight.shape[1])[: self.channels])

    def with_codes(self, codes: jax.Array) -> PlainCodes:
        """Codes [K, N] with the grid's parameters."""
        scales, zeros, channel_scales, table = self.parameters
        return PlainCodes(
            *(self.format, codes, scales, zeros), channel_scales=channel_scales, table=table
        )

    def group_of(self, channels: jax.Array) -> jax.Array:
        """The group of each of some input channels."""
        return channels // (self.format.group_size or self.channels)

    def row(self, group: jax.Array) -> Row:
        """The grid of one row of the weight. group: the index of its group, an array or an int."""
        scales, zeros, channel_scales, table = self.parameters
        zeros = None if zeros is None else zeros[group]
        return Row(self.format, Parameters(scales[group], zeros, channel_scales, table))


@dataclasses.dataclass(frozen=True)
class Row:
    """The grid of one row [N] of a weight."""

    format: WeightFormat
    parameters: Parameters

    def nearest(self, row: jax.Array) -> jax.Array:
        """The nearest codes [N] of a row float32 [N]."""
        return code_kinds.of(self.format).nearest(row, self.parameters)

    def decode(self, codes: jax.Array) -> jax.Array:
        """The values float32 [N] of codes [N]."""
        return code_kinds.of(self.format).decode(codes, self.parameters)


def fit(weight: jax.Array, format: WeightFormat, table: jax.Array | None = None) -> Grid:
    """Fits a grid that reaches all weights of each group; each kind of codes says how.

    weight: float32 [K, N], which the format can split. table: float32 [2**bits], ascending, of
    `table…` formats; normal float where it is None.
    """
    groups = in_groups(weight, format)
    return Grid(format, len(weight), code_kinds.of(format).fit(groups, format, table))
