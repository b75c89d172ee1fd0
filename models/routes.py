"""Given choices of routers: a forward pass sends tokens to the experts that a sampler chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import are_between, as_array, require_type, shown
from mpjax.models.experts import ExpertsSpec

if TYPE_CHECKING:
    from mpjax.models.decoder import Decoder

Routes = dict[int, jax.Array]  # of layers, int32 [batch, tokens, k]


def read_routes(model: Decoder, routes: Any, shape: tuple[int, int]) -> Routes | None:
    """The routes of tokens [batch, tokens], as arrays cut to these tokens; None stays None.

    routes: by layer, int [batch, tokens or more, k], such as `captured["router"]`.

    Raises ValueError for layers without experts, for other shapes and dtypes, for known indices out
    of range, and for a divided model.
    """
    if routes is None:
        return None
    require_type("routes", routes, Mapping, hint=' by layer, such as captured["router"]')
    if model.mesh is not None:
        raise ValueError("routes: the model is divided among devices: load it on one device")
    found: Routes = {}
    for layer, given in routes.items():
        layers = model.config.layers
        mlp = layers[layer].mlp if type(layer) is int and 0 <= layer < len(layers) else None
        if not isinstance(mlp, ExpertsSpec):
            raise ValueError(f"routes has {shown(layer)}: expected layers with experts")
        experts = as_array(f"routes of layer {layer}", given)
        wanted = shape[0], mlp.experts_per_token
        is_fitting = experts.ndim == 3 and (experts.shape[0], experts.shape[2]) == wanted
        is_whole = jnp.issubdtype(experts.dtype, jnp.integer)
        if not is_fitting or not is_whole or experts.shape[1] < shape[1]:
            raise ValueError(
                f"routes of layer {layer} are {shown(experts)}: expected integers of shape "
                f"({wanted[0]}, {shape[1]}, {wanted[1]}): batch, tokens and experts of a token"
            )
        if not are_between(experts, 0, mlp.num_experts - 1):
            raise ValueError(
                f"routes of layer {layer} must be from 0 to {mlp.num_experts - 1}, its experts"
            )
        found[layer] = experts[:, : shape[1]].astype(jnp.int32)
    return found
