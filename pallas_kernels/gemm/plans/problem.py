"""The problem of a product with a packed weight: the sizes and formats that its plan depends on."""

from __future__ import annotations

import dataclasses

from mpjax.kernels import codes as code_kinds
from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.product_format import ProductFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Problem:
    """The product x [rows, K] · W [K, N] with a packed W, on a GPU with these limits.

    rows: of x.
    format: of the weight and of the activations.
    channels: K, the input channels. outputs: N, the output channels.
    limits: of the GPU.
    """

    rows: int
    format: ProductFormat
    channels: int
    outputs: int
    limits: Limits

    @classmethod
    def of(cls, rows: int, weight: QuantizedTensor) -> Problem:
        """The product of `rows` rows and one matrix of a weight, on the default device.

        The format of activations follows from the weight's format.
        """
        *_, channels, outputs = weight.shape
        return cls(rows, ProductFormat.of(weight.format), channels, outputs, device.limits())

    @property
    def weight(self) -> WeightFormat:
        """The format of the weight."""
        return self.format.weight

    @property
    def has_table(self) -> bool:
        """Whether codes are indices of a table in which kernels look up values."""
        return code_kinds.has_table(self.weight)

    @property
    def blocks(self) -> int:
        """The number of blocks of K, which kernels process one after another."""
        return -(-self.channels // self.weight.block)
