"""Linear maps with trainable scales and tables, whose codes are fixed or chosen anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, matmul, pack, replace_scales, unpack
from mpjax.kernels.codes.base import Parameters
from mpjax.kernels.grid import Grid
from mpjax.models import FusedLinear, Linear
from mpjax.models.parameters import find
from mpjax.models.state import WHOLE, StepContext


class Learned(nnx.Variable):
    """Trainable arrays, initialised with zeros."""


class Fixed(nnx.Variable):
    """Arrays that are not trained."""


class LearnedLinear(Linear):
    """A packed linear map with trainable relative changes of its scales.

    Scales are start · (1 + gains): float32 [groups, N], or float32 [N] of output channels in
    formats with integer group scales. With shifts float32 [2**bits], the table is table + shifts.
    Codes are fixed or, with a latent weight [K, N], the nearest to it on the current grid
    (straight-through: the gradient treats codes as constant).
    """

    def __init__(self, base: Linear, *, learns_table: bool = False, latent: Any = None):
        kernel: Any = base.kernel.get_value()
        super().__init__(kernel, None if base.bias is None else base.bias.get_value())
        plain = unpack(kernel)
        start = plain.scales if plain.channel_scales is None else plain.channel_scales
        self.start = Fixed(start.astype(jnp.float32))
        self.gains = Learned(jnp.zeros(start.shape, jnp.float32))
        table = plain.table if learns_table else None
        self.shifts = None if table is None else Learned(jnp.zeros_like(table))
        self.latent = None if latent is None else Fixed(latent)

    def product(self, x: Any) -> jax.Array:
        """The product of x and the weight with the current scales, rounded as when stored."""
        kernel, scales = self._current()
        return matmul(x, kernel, scales=scales)

    def terms(self, x: Any, context: StepContext = WHOLE) -> jax.Array:
        """The output as a single term [1, ..., out]; see Linear.terms."""
        return self(x, context)[None]

    def packed(self) -> Linear:
        """A Linear whose packed weight has the learned scales and table."""
        kernel, scales = self._current()
        if scales is not None:
            kernel = replace_scales(kernel, scales)
        return Linear(kernel, None if self.bias is None else self.bias.get_value())

    def _current(self) -> tuple[QuantizedTensor, jax.Array | None]:
        """The packed weight, and its current scales if they belong to groups."""
        kernel: Any = self.kernel.get_value()
        scales = self.start.get_value() * (1 + self.gains.get_value())
        table = kernel.table
        if self.shifts is not None:
            table = table + self.shifts.get_value()
        is_of_channels = kernel.channel_scales is not None
        if self.latent is not None:
            kernel = _nearest(kernel, scales, table, self.latent.get_value())
        if is_of_channels:
            return dataclasses.replace(kernel, channel_scales=scales), None
        return dataclasses.replace(kernel, table=table), scales


def _nearest(
    kernel: QuantizedTensor, scales: jax.Array, table: jax.Array | None, weight: jax.Array
) -> QuantizedTensor:
    """A packed weight with the codes nearest to a weight [K, N], without gradient.

    weight: rows in the order of input channels. The kernel keeps its permutation (its scales are
    for groups of permuted rows) and its activation widths.
    """
    plain = unpack(kernel)
    if plain.channel_scales is None:
        parameters = Parameters(scales.astype(plain.scales.dtype), plain.zeros, None, table)
    else:
        parameters = Parameters(plain.scales, plain.zeros, scales)
    grid = Grid(plain.format, plain.shape[0], jax.lax.stop_gradient(parameters))
    rows = weight if plain.permutation is None else weight[plain.permutation]
    nearest = grid.round(rows.astype(jnp.float32))
    return pack(
        dataclasses.replace(
            nearest, permutation=plain.permutation, activation_bits=plain.activation_bits
        )
    )


def why_not(format: WeightFormat) -> str | None:
    """The reason why the scales of a format can't be learned, or None."""
    if format.codes == "float8" and format.group_size is not None:
        return f"{format} has scales that blocks of output channels share"
    if format.codes == "float4":
        return f"{format} has scales that must be powers of two"
    return None


def replace_linears(
    layer: nnx.Module, paths: Iterable[str], change: Callable[[str, Linear], Linear]
) -> None:
    """Replaces each Linear, or part of a FusedLinear, at `paths` by the result of `change`."""
    for path in paths:
        node = find(layer, path)
        if isinstance(node, FusedLinear):
            node.parts = nnx.List([change(path, part) for part in node.parts])
        elif isinstance(node, Linear):
            parent, _, name = path.rpartition(".")
            setattr(find(layer, parent), name, change(path, node))


def pack_all(layer: nnx.Module, paths: Iterable[str]) -> None:
    """Replaces each LearnedLinear at `paths` by a packed Linear."""
    replace_linears(
        layer, paths, lambda _, it: it.packed() if isinstance(it, LearnedLinear) else it
    )
