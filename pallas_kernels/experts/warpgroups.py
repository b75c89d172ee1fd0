"""The grouped product by Hopper's warpgroups: the dense product's kernel over tiles of experts.

The rows of x are sorted by expert, and padded so that every tile has one expert. A program is that
of `gemm.warpgroups`, but copies the blocks of words of its tile's expert out of the stack. With a
gate, half of a tile's output channels are gate and half are up, and the epilogue combines them;
without a gate, it multiplies by the routing weights.
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


def products(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    tiles: Tiles,
    epilogue: Epilogue,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The products of all pairs, [1, pairs, N], or with a gate [1, pairs, N / 2].

    With routing weights they are one term, float32 [1, tokens, N]: a token's weighted products,
    rounded to `out_dtype`, and summed in the order of k.

    x: [tokens, K], or [pairs, K] with a row for each pair. weight: [experts, K, N].
    config: without splits.
    """
    rows = in_tiles(x, tiles)
    found = of_tiles(rows, weight, tiles, epilogue, config, out_dtype, interpret=interpret)
    if epilogue.routing_weights is None:
        return jnp.take(found, places(tiles), axis=0, mode="clip")[None]
    return of_tokens(found, tiles, epilogue.routing_weights.shape[1])[None]


def in_tiles(x: jax.Array | QuantizedActivations, tiles: Tiles) -> jax.Array | QuantizedActivations:
    """The rows of x, of tokens or of pairs, in the order of tiles: [tiles · tile_m, K].

    Rows without a pair have arbitrary values.
    """
    assert tiles.pairs is not None
    count = len(x if isinstance(x, jax.Array) else x.values)
    row = tiles.pairs.reshape(-1) // (tiles.count // count)
    return jax.tree.map(lambda array: jnp.take(array, row, axis=0, mode="clip"), x)


# This function has its own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def of_tiles(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    tiles: Tiles,
    epilogue: Epilogue,
    config: WarpgroupConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The products of rows in the order of tiles, [tiles · tile_m, N], or [tiles · tile_m, N / 2].

    Rows of unused tiles are undefined.
    """
    values = x if isinstance(x, jax.Array) else x.values
    if isinstance(weight, QuantizedTensor):
        # Copies of channels beyond x are zeros, but not in interpret mode.
        multiple = weight.padded_channels if interpret else weight.format.plane_width
        padding = -values.shape[1] % multiple
        values = jnp.pad(values, ((0, 0), (0, padding))) if padding else values
    x = values if isinstance(x, jax.Array) else dataclasses.replace(x, values=values)
    weights = epilogue.routing_weights
    if weights is not None:
        assert tiles.pairs is not None
        of_pairs = weights.astype(jnp.float32).reshape(-1)
        weights = jnp.take(of_pairs, tiles.pairs.reshape(-1), mode="clip")
    own = grouped.Tiles(tiles.expert, epilogue.bias, epilogue.gate, weights)
    return grouped.products(x, weight, own, config, out_dtype, interpret=interpret)


def of_tokens(products: jax.Array, tiles: Tiles, per_token: int) -> jax.Array:
    """The float32 sums [tokens, N] of each token's products, in the order of k."""
    of_token = places(tiles).reshape(-1, per_token)
    # Pairs with other devices' experts have indices beyond all rows.
    others: dict[str, Any] = {"mode": "fill", "fill_value": 0}
    rule = others if tiles.is_partial else {"mode": "clip"}
    total, *more = (jnp.take(products, place, axis=0, **rule) for place in of_token.T)
    total = total.astype(jnp.float32)
    for product in more:
        total += product.astype(jnp.float32)
    return total
