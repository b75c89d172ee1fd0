"""Hadamard's transform of what down projections read, in every step (QuaRot's R4).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024), §4.2. Few channels
between gate and down are much larger than others, and no norm lies there that a rotation could be
folded into. So the MLP mixes blocks of channels before they are rounded, and the rows of the down
projection are mixed alike: the transform is its own inverse, and the model computes what it did.
Each expert of a mixture has a down projection of its own, and so has an MLP that all tokens share.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from mpjax.kernels import hadamard
from mpjax.models import Decoder, DecoderConfig, DecoderLayer, LayerSpec, MLPSpec
from mpjax.models.parameters import find
from mpjax.quantization.methods import HADAMARD

# A larger block spreads outliers further, and fewer devices can divide a row in whole blocks.
LARGEST, LEAST = 512, 16


def block_of(spec: MLPSpec) -> int:
    """The channels of a block: the largest power of two up to 512 that divides those of the MLP.

    In a mixture it divides those of the experts and of the shared MLP.

    Raises ValueError for an MLP without a place for the transform, one with less than 16, and one
    that has the transform.
    """
    sizes = spec.mixers().values()
    if not sizes:
        raise ValueError(
            f"an MLP of the kind {spec.kind!r} has no place for Hadamard's transform before its "
            f"down projections: leave {HADAMARD} out of the method"
        )
    if spec.hadamard is not None:
        raise ValueError(
            f"the model mixes what its down projections read already: leave {HADAMARD} out of the "
            "method"
        )
    common = math.gcd(*sizes, LARGEST)
    block = common & -common
    if block < LEAST:
        raise ValueError(
            f"an MLP with {' and '.join(map(str, sizes))} channels can't be cut into blocks of "
            f"{LEAST} or more, a power of two: leave {HADAMARD} out of the method"
        )
    return block


def check_blocks(config: DecoderConfig) -> None:
    """Raises ValueError, which names the layer, for a model that the transform has no place in."""
    for number, layer in enumerate(config.layers):
        try:
            if layer.mlp is not None:
                block_of(layer.mlp)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error


def set_blocks(model: Decoder) -> None:
    """Writes the blocks of all layers into the configuration of a model; see `mix_down`."""
    layers = tuple(
        dataclasses.replace(
            layer,
            mlp=layer.mlp and dataclasses.replace(layer.mlp, hadamard=block_of(layer.mlp)),
        )
        for layer in model.config.layers
    )
    model.config = dataclasses.replace(model.config, layers=layers)


def mix_down(layer: DecoderLayer, spec: LayerSpec, *, is_folded: bool) -> None:
    """Gives a layer the transform of its spec, and undoes it in its down projections, in place.

    is_folded: whether the down projections are made for the transform already. Else they are plain.
    """
    if spec.mlp is None:
        return
    block = spec.mlp.hadamard
    assert block is not None
    for path in spec.mlp.mixers():
        whole: Any = layer.mlp
        mlp: Any = find(whole, path) if path else whole
        mlp.hadamard = block
        if not is_folded:
            kernel = mlp.down.kernel
            kernel.set_value(_mixed_rows(kernel.get_value(), block))


def _mixed_rows(weight: jax.Array, block: int) -> jax.Array:
    """A weight [..., K, N] with its rows transformed, one expert at a time."""
    if weight.ndim > 2:
        return jax.lax.map(lambda each: _mixed_rows(each, block), weight)
    return hadamard(weight.T, block).T.astype(weight.dtype)
