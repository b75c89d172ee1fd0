"""Hadamard's transform of what down projections read, in every step (QuaRot's R4).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024), §4.2. Few channels
between gate and down are much larger than others, and no norm lies there that a rotation could be
folded into. So the MLP mixes blocks of channels before they are rounded, and the rows of the down
projection are mixed alike: the transform is its own inverse, and the model computes what it did.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpjax.kernels import hadamard
from mpjax.models import Decoder, DecoderConfig, DecoderLayer, GatedMLPSpec, LayerSpec, MLPSpec
from mpjax.quantization.methods import HADAMARD

# A larger block spreads outliers further, and fewer devices can divide a row in whole blocks.
LARGEST, LEAST = 512, 16


def block_of(spec: MLPSpec) -> int:
    """The channels of a block: the largest power of two up to 512 that divides those of the MLP.

    Raises ValueError for an MLP of experts, one with less than 16, and one with the transform.
    """
    if not isinstance(spec, GatedMLPSpec):
        raise ValueError(
            f"an MLP of the kind {spec.kind!r} has no place for Hadamard's transform before its "
            f"down projections: leave {HADAMARD} out of the method"
        )
    if spec.hadamard is not None:
        raise ValueError(
            f"the model mixes what its down projections read already: leave {HADAMARD} out of the "
            "method"
        )
    size = spec.intermediate_size
    block = min(size & -size, LARGEST)
    if block < LEAST:
        raise ValueError(
            f"an MLP with {size} channels can't be cut into blocks of {LEAST} or more, a power of "
            f"two: leave {HADAMARD} out of the method"
        )
    return block


def check_blocks(config: DecoderConfig) -> None:
    """Raises ValueError, which names the layer, for a model that the transform has no place in."""
    for number, layer in enumerate(config.layers):
        try:
            block_of(layer.mlp)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error


def set_blocks(model: Decoder) -> None:
    """Writes the blocks of all layers into the configuration of a model; see `mix_down`."""
    layers = []
    for layer in model.config.layers:
        assert isinstance(layer.mlp, GatedMLPSpec)  # as `check_blocks` requires
        mlp = dataclasses.replace(layer.mlp, hadamard=block_of(layer.mlp))
        layers.append(dataclasses.replace(layer, mlp=mlp))
    model.config = dataclasses.replace(model.config, layers=tuple(layers))


def mix_down(layer: DecoderLayer, spec: LayerSpec, *, is_folded: bool) -> None:
    """Gives a layer the transform of its spec, and undoes it in the down projection, in place.

    is_folded: whether the down projection is made for the transform already. Else it is plain.
    """
    mlp: Any = layer.mlp
    assert isinstance(spec.mlp, GatedMLPSpec)
    assert spec.mlp.hadamard is not None
    mlp.hadamard = spec.mlp.hadamard
    if not is_folded:
        kernel = mlp.down.kernel
        weight = kernel.get_value()
        kernel.set_value(hadamard(weight.T, mlp.hadamard).T.astype(weight.dtype))
