"""The problem of a grouped product: the sizes and formats that its plan depends on."""

from __future__ import annotations

import dataclasses

import jax

from mpjax.kernels import device
from mpjax.kernels.device import Limits
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans import Problem as Product
from mpjax.kernels.product_format import ProductFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Problem:
    """The products of `tokens` tokens, each with `per_token` of `experts` matrices [K, N].

    format: of the weight and of the activations. channels: K. outputs: N. gated: whether the
    epilogue joins the two halves of N. limits: of the GPU.
    """

    tokens: int
    per_token: int
    experts: int
    format: ProductFormat
    channels: int
    outputs: int
    gated: bool
    limits: Limits

    @classmethod
    def of(
        cls, chosen: tuple[int, ...], weight: jax.Array | QuantizedTensor, *, gated: bool
    ) -> Problem:
        """The problem of a stack of weights on the default device.

        chosen: the numbers of tokens and of each token's experts. All plain weights have the format
        `bfloat16` here.
        """
        plain = WeightFormat("bfloat16")
        format = ProductFormat.of(weight.format if isinstance(weight, QuantizedTensor) else plain)
        experts, channels, outputs = weight.shape
        tokens, per_token = chosen
        return cls(tokens, per_token, experts, format, channels, outputs, gated, device.limits())

    @property
    def pairs(self) -> int:
        """The number of pairs of a token and an expert."""
        return self.tokens * self.per_token

    @property
    def halves(self) -> int:
        """The parts of N that the epilogue joins: two with a gate, else one."""
        return 2 if self.gated else 1

    @property
    def hit(self) -> int:
        """The number of experts that get a token, if every expert is as likely as any other."""
        missed = (1 - self.per_token / self.experts) ** self.tokens
        return max(1, min(self.pairs, round(self.experts * (1 - missed))))

    def product(self, rows: int) -> Product:
        """The product with one matrix that has as many tiles of `rows` rows as all that are hit.

        Its outputs are those of all experts that are hit, side by side.
        """
        tiles = max(self.hit, -(-self.pairs // rows))
        return Product(rows, self.format, self.channels, self.outputs * tiles, self.limits)
