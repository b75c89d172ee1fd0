"""The widths of the blocks in which activations are rounded, of all linear maps of a W4Ax model."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.kernels import QuantizedTensor
from mpjax.models import Decoder, Linear
from mpjax.precision import Precision


class BlockCount(NamedTuple):
    """The number of blocks of activations in 8 bits, and of all blocks."""

    wide: int
    total: int


def count_blocks(model: Decoder) -> BlockCount | None:
    """The blocks of a model's `int4` linear maps; None if there are none, or only their shapes."""
    wide = total = 0
    for linear in _mixed(model):
        kernel: Any = linear.kernel.get_value()
        bits, count = kernel.activation_bits, math.prod(kernel.parameters.shape[:-1])
        if bits is not None and not hasattr(bits, "__array__"):
            return None
        wide += count if bits is None else int((np.asarray(bits) == 8).sum())
        total += count
    return BlockCount(wide, total) if total else None


def set_uncalibrated(model: Decoder, precision: Precision) -> None:
    """Gives the `int4` linear maps of a model that was not calibrated their blocks.

    With A4 all blocks have 4 bits, with Ax1 all have 8. Any other share needs statistics of a text
    to say which blocks can do with 4 bits, so that all have 8, with a warning.
    """
    linears = list(_mixed(model))
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


def _mixed(model: Decoder) -> Iterator[Linear]:
    """The linear maps whose activations are rounded in blocks."""
    for place in model.linear_places(model.config):
        for linear in place.parts(model):
            kernel = linear.kernel.get_value()
            if isinstance(kernel, QuantizedTensor) and kernel.format.codes == "int4":
                yield linear
