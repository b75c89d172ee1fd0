"""Grids: the values to which a weight can be rounded, before codes are chosen.

A quantiser first fits a grid to a weight (scales, zero points), and then chooses a code of the grid
for each element. Quantisers use a format only through these two steps: a search of ranges fits
several grids, and GPTQ chooses codes other than the nearest.
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
    """The grid of a weight [K, N]; a pytree.

    format: of the weight. channels: K.
    parameters: scales [groups, N] and, depending on the format, zero points, channel scales and a
        table; see PlainCodes. They determine the value of each code.
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
        """The quantised weight with codes [K, N] of this grid."""
        scales, zeros, channel_scales, table = self.parameters
        return PlainCodes(
            *(self.format, codes, scales, zeros), channel_scales=channel_scales, table=table
        )

    def group_of(self, channels: jax.Array) -> jax.Array:
        """The index of the group of each input channel."""
        return channels // (self.format.group_size or self.channels)

    def row(self, group: jax.Array) -> Row:
        """The grid of the rows of one group. group: its index, an int or an int array []."""
        scales, zeros, channel_scales, table = self.parameters
        zeros = None if zeros is None else zeros[group]
        return Row(self.format, Parameters(scales[group], zeros, channel_scales, table))


@dataclasses.dataclass(frozen=True)
class Row:
    """The grid of one row [N] of a weight: as Grid, with the parameters of the row's group."""

    format: WeightFormat
    parameters: Parameters

    def nearest(self, row: jax.Array) -> jax.Array:
        """The nearest codes [N] of a row float32 [N]."""
        return code_kinds.of(self.format).nearest(row, self.parameters)

    def decode(self, codes: jax.Array) -> jax.Array:
        """The values float32 [N] of codes [N]."""
        return code_kinds.of(self.format).decode(codes, self.parameters)


def fit(weight: jax.Array, format: WeightFormat, table: jax.Array | None = None) -> Grid:
    """Fits a grid that spans all weights of each group, by the rule of the format's codes.

    weight: float32 [K, N], of a shape that the format can split into groups.
    table: float32 [2**bits], ascending, for `table…` formats; None for normal float.
    """
    groups = in_groups(weight, format)
    return Grid(format, len(weight), code_kinds.of(format).fit(groups, format, table))
