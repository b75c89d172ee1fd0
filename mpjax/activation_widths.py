"""Counts and sets the activation widths of blocks in W4Ax models."""

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
    """The number of 8-bit activation blocks, and of all blocks."""

    wide: int
    total: int


def count_blocks(model: Decoder) -> BlockCount | None:
    """The blocks of a model's `int4` linear maps; None without any, or if only shapes are known."""
    layers = count_by_layer(model)
    return BlockCount(*map(sum, zip(*layers, strict=True))) if layers else None


def count_by_layer(model: Decoder) -> list[BlockCount]:
    """The blocks of each layer with `int4` linear maps; empty for an abstract model.

    If several processes share the model, only blocks on this process's devices are counted.
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
    """The number of 8-bit blocks for a (fractional) share of blocks: rounded, at least one."""
    return max(1, int(share + Fraction(1, 2)))


def has_share(model: Decoder, one_in: int) -> bool:
    """Whether each layer has the number of 8-bit blocks that `one_in` gives.

    one_in: as `Precision.wide_blocks`; several values may give the same number. The default, `W4Ax`
    without a number, fits every model with blocks of both widths, since an error bound or rules for
    single maps may have chosen them.
    """
    layers = count_by_layer(model)
    if one_in == DEFAULT_WIDE_BLOCKS:
        return not layers or not (_have_share(layers, 0) or _have_share(layers, 1))
    return _have_share(layers, one_in)


def find_share(model: Decoder) -> int:
    """The `Precision.wide_blocks` that fits the number of 8-bit blocks of each layer.

    If several fit, it is the default or else the smallest power of two. It is DEFAULT_WIDE_BLOCKS
    if no value fits all layers, and for a model on several devices with blocks of both widths,
    since devices duplicate blocks.
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
    """Sets the block widths of an uncalibrated model's `int4` linear maps.

    With A4 all blocks have 4 bits, with Ax1 all have 8. Other shares need calibration text to
    choose the blocks; without it all have 8, with a warning.
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
    """The block widths on this process's devices."""
    if isinstance(bits, jax.Array) and not bits.is_fully_addressable:
        return np.concatenate([np.asarray(shard.data) for shard in bits.addressable_shards])
    return np.asarray(bits)


def _mixed(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """The `int4` linear maps, with the paths of their places."""
    for place in model.linear_places(model.config):
        for linear in place.parts(model):
            kernel = linear.kernel.get_value()
            if isinstance(kernel, QuantizedTensor) and kernel.format.codes == "int4":
                yield place.path, linear
