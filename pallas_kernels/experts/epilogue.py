"""The end of a product with an expert's matrix: a bias, a gate, a routing weight."""

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
    """The operations on a product [N] of a token and an expert, in their order.

    bias: [experts, N], added. gate: joins the two halves of the sum. routing_weights: [tokens, k],
    a factor. None leaves an operation out.
    """

    bias: jax.Array | None = None
    gate: Gate | None = None
    routing_weights: jax.Array | None = None
