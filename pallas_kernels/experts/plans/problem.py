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
    epilogue combines the two halves of N. limits: of the GPU. held_experts: the number of matrices
    in the stack, if it has only some of the experts; None for all.
    """

    tokens: int
    per_token: int
    experts: int
    format: ProductFormat
    channels: int
    outputs: int
    gated: bool
    limits: Limits
    held_experts: int | None = None

    @classmethod
    def of(
        cls,
        chosen: tuple[int, ...],
        weight: jax.Array | QuantizedTensor,
        *,
        gated: bool,
        total: int | None = None,
    ) -> Problem:
        """The problem of a stack of weights on the default device.

        chosen: the numbers of tokens and of each token's experts. total: the number of all experts,
        if the stack has only some of them (LocalExperts). All plain weights have the format
        `bfloat16` here.
        """
        plain = WeightFormat("bfloat16")
        format = ProductFormat.of(weight.format if isinstance(weight, QuantizedTensor) else plain)
        held, channels, outputs = weight.shape
        tokens, per_token = chosen
        experts = held if total is None else max(held, total)
        sizes = channels, outputs, gated, device.limits()
        return cls(tokens, per_token, experts, format, *sizes, held)

    @property
    def pairs(self) -> int:
        """The number of pairs of a token and an expert, including experts outside of the stack."""
        return self.tokens * self.per_token

    @property
    def held(self) -> int:
        """The number of experts in the stack."""
        return self.experts if self.held_experts is None else self.held_experts

    @property
    def own_pairs(self) -> int:
        """The expected number of pairs with experts of the stack, if all are equally likely."""
        return -(-self.pairs * self.held // self.experts)

    @property
    def halves(self) -> int:
        """The number of parts of N that the epilogue combines: two with a gate, else one."""
        return 2 if self.gated else 1

    @property
    def hit(self) -> int:
        """The expected number of the stack's experts with a token, if all are equally likely."""
        missed = max(0.0, 1 - self.per_token / self.experts) ** self.tokens
        return max(1, min(self.pairs, round(self.held * (1 - missed))))

    def product(self, rows: int) -> Product:
        """The dense product with as many tiles: over the experts that get a token.

        Its outputs are the concatenated outputs of these experts.
        """
        tiles = max(self.hit, -(-self.own_pairs // rows))
        return Product(rows, self.format, self.channels, self.outputs * tiles, self.limits)
