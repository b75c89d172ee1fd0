"""The problem that a product with a packed weight is."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat


class PackedWeight(Protocol):
    """What a problem has to know of a weight."""

    @property
    def format(self) -> WeightFormat:
        """The format of W."""

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The product x [rows, K] · W [K, N], W packed, on a GPU with some limits.

    channels: K, the input channels. outputs: N, the output channels.
    """

    rows: int
    format: WeightFormat
    channels: int
    outputs: int
    limits: Limits

    @classmethod
    def of(cls, rows: int, weight: PackedWeight) -> Problem:
        """The product of x with so many rows and a weight, on the default device."""
        return cls(rows, weight.format, *weight.shape, device.limits())

    @property
    def has_table(self) -> bool:
        """Whether codes index a table, so that decoding looks values up."""
        return code_kinds.of(self.format).has_table

    @property
    def blocks(self) -> int:
        """Blocks of K, which kernels take one after another."""
        return -(-self.channels // self.format.block)
