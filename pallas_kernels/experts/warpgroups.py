"""The grouped product by Hopper's warpgroups: the dense product's kernel over tiles of experts.

The rows of x are copied to the order of their experts, with rows between them so that every tile
has one expert. A program is that of `gemm.warpgroups`: its tile of rows has an expert, whose blocks
of words it copies out of the stack. With a gate, half of a tile's output channels are gate and half
are up, and the epilogue joins them; without, it multiplies by the routing weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.tiles import Tiles, places
from mpjax.kernels.gemm import grouped
from mpjax.kernels.gemm.plans import WarpgroupConfig
from mpjax.kernels.quantized_tensor import QuantizedTensor


# This function has a `jit` of its own, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def products(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    tiles: Tiles,
    epilogue: Epilogue,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The products of all pairs, [1, pairs, N], or with a gate [1, pairs, N / 2].

    With routing weights they are one term [1, tokens, N]: a token's products times them, summed in
    the order of k.

    x: [tokens, K], or [pairs, K] with a row for each pair. weight: [experts, K, N], packed.
    config: without splits.
    """
    rows = _in_tiles(x, tiles, weight.padded_channels)
    row_weights = _weights_of_rows(epilogue.routing_weights, tiles)
    of_tiles = grouped.Tiles(tiles.expert, epilogue.bias, epilogue.gate, row_weights)
    found = grouped.products(rows, weight, of_tiles, config, out_dtype, interpret=interpret)
    if epilogue.routing_weights is None:
        return jnp.take(found, places(tiles), axis=0)[None]
    of_tokens = places(tiles).reshape(epilogue.routing_weights.shape)
    missing: dict[str, Any] = {"mode": "fill", "fill_value": 0} if tiles.is_partial else {}
    total, *others = (jnp.take(found, place, axis=0, **missing) for place in of_tokens.T)
    for product in others:
        total += product
    return total[None]


def _in_tiles(
    x: jax.Array | QuantizedActivations, tiles: Tiles, channels: int
) -> jax.Array | QuantizedActivations:
    """The rows of x in the order of tiles, [tiles · tile_m, channels], with zeros beyond K.

    Rows without a pair have values of others.
    """
    assert tiles.pairs is not None
    count = len(x if isinstance(x, jax.Array) else x.values)
    row = tiles.pairs.reshape(-1) // (tiles.count // count)

    def ordered(array: jax.Array, size: int) -> jax.Array:
        found = jnp.take(array, row, axis=0, mode="clip")
        return jnp.pad(found, ((0, 0), (0, size - array.shape[1])))

    if isinstance(x, jax.Array):
        return ordered(x, channels)
    scales = ordered(x.scales, x.scales.shape[1])
    return dataclasses.replace(x, values=ordered(x.values, channels), scales=scales)


def _weights_of_rows(weights: jax.Array | None, tiles: Tiles) -> jax.Array | None:
    """The routing weight of each row of the tiles, float32, from those of pairs [tokens, k]."""
    if weights is None:
        return None
    assert tiles.pairs is not None
    of_pairs = weights.astype(jnp.float32).reshape(-1)
    return jnp.take(of_pairs, tiles.pairs.reshape(-1), mode="clip")
