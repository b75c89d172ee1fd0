"""The epilogue of a product with an expert's matrix: bias, gate, routing weight."""

from __future__ import annotations

import dataclasses
import functools

import jax

from mpjax.kernels.experts.gate import Gate


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "routing_weights"],
    meta_fields=["gate"],
)
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The operations on a product [N] of a token and an expert, in their order; None: no operation.

    bias: [experts, N], added. gate: combines the two halves of the sum. routing_weights: [tokens,
    k], a factor.
    """

    bias: jax.Array | None = None
    gate: Gate | None = None
    routing_weights: jax.Array | None = None
