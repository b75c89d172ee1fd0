"""The logits of a router, by which the experts of tokens are chosen."""

from __future__ import annotations

import dataclasses
import functools

import jax

from mpjax.kernels.checks import as_array, optional_array, require_type, shown
from mpjax.kernels.experts.routing import route
from mpjax.kernels.experts.routing_rules import Routing


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "correction", "bias", "gain", "chosen"],
    meta_fields=["routing"],
)
@dataclasses.dataclass(frozen=True)
class RouterLogits:
    """Tokens whose experts are not yet chosen: the arguments of `route`.

    logits: [..., experts]. routing: how experts are chosen and weighted (static). correction:
    [experts], the selection bias, added to scores. bias: [experts], added to logits. gain:
    [experts], factors of the weights (Gemma 4). chosen: int [..., k], experts that are
    given; None: they are chosen.

    `expert_mlp_terms` accepts it instead of experts: the first product of few tokens then chooses
    experts itself, which saves a kernel.
    """

    logits: jax.Array
    routing: Routing
    correction: jax.Array | None = None
    bias: jax.Array | None = None
    gain: jax.Array | None = None
    chosen: jax.Array | None = None

    def __post_init__(self) -> None:
        require_type("RouterLogits: routing", self.routing, Routing)

    def read(self, operation: str) -> RouterLogits:
        """The same with arrays. Raises ValueError for arguments that can't be converted."""
        return RouterLogits(
            as_array(f"{operation}: logits", self.logits),
            self.routing,
            optional_array(f"{operation}: correction", self.correction),
            optional_array(f"{operation}: bias", self.bias),
            optional_array(f"{operation}: gain", self.gain),
            optional_array(f"{operation}: chosen", self.chosen),
        )

    def gained(self, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """The weights float32 [..., k] of experts int32 [..., k], times the experts' gains.

        Raises ValueError for gains of another shape.
        """
        if (gain := optional_array("RouterLogits: gain", self.gain)) is None:
            return weights
        if gain.shape != (shape := as_array("RouterLogits: logits", self.logits).shape[-1:]):
            raise ValueError(f"RouterLogits: gain is {shown(gain)}: expected shape {shape}")
        return weights * gain[experts].astype(weights.dtype)

    def route(self) -> tuple[jax.Array, jax.Array]:
        """The experts of each token, int32 [..., k], and their weights, float32 [..., k].

        Raises ValueError for shapes that don't fit.
        """
        experts, weights = route(
            self.logits, self.routing, self.correction, self.bias, chosen=self.chosen
        )
        return experts, self.gained(experts, weights)
