"""The online Hadamard transform of down projections' inputs (QuaRot's R4).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024), §4.2. A few of the
channels between gate and down are much larger than the others, and a rotation can't be folded
through the elementwise gate. So the MLP transforms blocks of channels before they are rounded, and
the rows of the down projection are transformed alike: the transform is its own inverse, so the
model's function doesn't change. Each expert has its own down projection, as has a shared expert.
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

# Larger blocks spread outliers further, but allow fewer devices to divide a row in whole blocks.
LARGEST, LEAST = 512, 16


def block_of(spec: MLPSpec) -> int:
    """The block size: the largest power of two up to 512 that divides the MLP's channels.

    In a mixture, it divides the channels of the experts and of the shared expert.

    Raises ValueError for an MLP that doesn't support the transform, a block size below 16, and an
    MLP that already has the transform.
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
    """Raises ValueError, which names the layer, for a model that doesn't support the transform."""
    for number, layer in enumerate(config.layers):
        try:
            if layer.mlp is not None:
                block_of(layer.mlp)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error


def set_blocks(model: Decoder) -> None:
    """Sets the block sizes of all layers in the model's configuration; see `mix_down`."""
    layers = tuple(
        dataclasses.replace(
            layer,
            mlp=layer.mlp and dataclasses.replace(layer.mlp, hadamard=block_of(layer.mlp)),
        )
        for layer in model.config.layers
    )
    model.config = dataclasses.replace(model.config, layers=layers)


def mix_down(layer: DecoderLayer, spec: LayerSpec, *, is_folded: bool) -> None:
    """Enables the transform in a layer, and folds its inverse into the down projections, in place.

    is_folded: whether the inverse is already folded in; otherwise kernels must be unquantised.
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
    """A weight [..., K, N] with transformed rows, one expert at a time."""
    if weight.ndim > 2:
        return jax.lax.map(lambda each: _mixed_rows(each, block), weight)
    return hadamard(weight.T, block).T.astype(weight.dtype)
