"""The widths of the blocks in which activations are rounded, of all linear maps of a W4Ax model."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.kernels import QuantizedTensor
from mpjax.models import Decoder, Linear
from mpjax.precision import DEFAULT_WIDE_BLOCKS, Precision


class BlockCount(NamedTuple):
    """The number of blocks of activations in 8 bits, and of all blocks."""

    wide: int
    total: int


def count_blocks(model: Decoder) -> BlockCount | None:
    """The blocks of a model's `int4` linear maps; None if there are none, or only their shapes."""
    layers = count_by_layer(model)
    return BlockCount(*map(sum, zip(*layers, strict=True))) if layers else None


def count_by_layer(model: Decoder) -> list[BlockCount]:
    """The blocks of each layer with `int4` linear maps; none of a model that has only shapes.

    Of a model that several processes share, the blocks on this process's devices.
    """
    layers: dict[str, BlockCount] = {}
    for path, linear in _mixed(model):
        kernel: Any = linear.kernel.get_value()
        bits = kernel.activation_bits
        if bits is not None and not hasattr(bits, "__array__"):
            return []
        wide = total = math.prod(kernel.parameters.shape[:-1])
        if bits is not None:
            own = _own(bits)
            wide, total = int((own == 8).sum()), own.size
        layer = ".".join(path.split(".")[:2])
        before = layers.get(layer, BlockCount(0, 0))
        layers[layer] = BlockCount(before.wide + wide, before.total + total)
    return list(layers.values())


def blocks_of_share(share: Fraction) -> int:
    """The number of blocks in 8 bits for a share of a layer's blocks: rounded, at least one."""
    return max(1, int(share + Fraction(1, 2)))


def has_share(model: Decoder, one_in: int) -> bool:
    """Whether each layer has as many blocks in 8 bits as quantisation gives it.

    one_in: as `Precision.wide_blocks`. Several shares may round to the same blocks. The default,
    `W4Ax` without a number, fits every model with blocks of both widths, since an error limit or
    rules for single maps may have chosen them.
    """
    layers = count_by_layer(model)
    if one_in == DEFAULT_WIDE_BLOCKS:
        return not layers or not (_have_share(layers, 0) or _have_share(layers, 1))
    return _have_share(layers, one_in)


def find_share(model: Decoder) -> int:
    """The share of blocks in 8 bits, as `Precision.wide_blocks`: one that each layer has.

    Of several, it is the default or else the smallest power of two, which is the usual request.
    It is DEFAULT_WIDE_BLOCKS where no single number gives the blocks of all layers. So it is, too,
    of a model on several devices with blocks of both widths, as devices repeat blocks.
    """
    layers = count_by_layer(model)
    most = max((count.total for count in layers), default=0)
    others = range(2, 2 * most + 1) if model.mesh is None else range(0)
    powers_first = sorted(others, key=lambda one_in: (one_in.bit_count() > 1, one_in))
    for one_in in (0, 1, DEFAULT_WIDE_BLOCKS, *powers_first):
        if layers and _have_share(layers, one_in):
            return one_in
    return DEFAULT_WIDE_BLOCKS


def _have_share(layers: list[BlockCount], one_in: int) -> bool:
    return all(
        count.wide == (blocks_of_share(Fraction(count.total, one_in)) if one_in else 0)
        for count in layers
    )


def set_uncalibrated(model: Decoder, precision: Precision) -> None:
    """Gives the `int4` linear maps of a model that was not calibrated their blocks.

    With A4 all blocks have 4 bits, with Ax1 all have 8. Any other share needs statistics of a text
    to say which blocks can do with 4 bits, so that all have 8, with a warning.
    """
    linears = [linear for _, linear in _mixed(model)]
    if linears and precision.wide_blocks > 1:
        warnings.warn(
            f"{precision}: without a text nothing says which blocks of activations can have 4 "
            "bits, so that all have 8: calibrate with mpjax.quantize or `mpjax quantize`, or ask "
            "for W4A4 or W4Ax1",
            stacklevel=3,
        )
    for linear in linears if precision.wide_blocks == 0 else []:
        kernel: Any = linear.kernel.get_value()
        bits = jnp.full(kernel.parameters.shape[:-1], 4, jnp.uint8)
        if model.mesh is not None:
            bits = jax.device_put(
                bits, NamedSharding(model.mesh, PartitionSpec(*model.mesh.axis_names))
            )
        linear.kernel.set_value(dataclasses.replace(kernel, activation_bits=bits))


def _own(bits: Any) -> np.ndarray:
    """The widths of blocks on this process's devices."""
    if isinstance(bits, jax.Array) and not bits.is_fully_addressable:
        return np.concatenate([np.asarray(shard.data) for shard in bits.addressable_shards])
    return np.asarray(bits)


def _mixed(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """The linear maps whose activations are rounded in blocks, and the paths of their places."""
    for place in model.linear_places(model.config):
        for linear in place.parts(model):
            kernel = linear.kernel.get_value()
            if isinstance(kernel, QuantizedTensor) and kernel.format.codes == "int4":
                yield place.path, linear
