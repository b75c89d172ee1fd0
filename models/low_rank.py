"""Adapters' changes of linear maps: one adapter for all tokens, or a stack to choose from by row.

A change is x · down · up (LoRA), beside a base map that is packed or not and stays as it is. For a
stack, kernels that group rows by adapter add the changes to the base's products in place
(`add_low_rank`). Experts and whole tables, which these kernels lack, use the grouped product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import (
    QuantizedActivations,
    QuantizedTensor,
    add_low_rank,
    gated_low_rank,
    matmul_low_rank_terms,
    matmul_terms,
)
from mpjax.kernels.checks import are_between, as_array, shown
from mpjax.kernels.invariance import product as in_rows
from mpjax.kernels.low_rank.reference import product
from mpjax.models.device_sums import add_over_devices
from mpjax.models.state import StepContext

Activations = jax.Array | QuantizedActivations


class LowRank(nnx.Module):
    """The changes of one adapter, or of a stack of adapters, of the linear maps of one input.

    down: [*adapters, *experts, in, maps · rank], the first factors of all maps side by side.
    ups: for each map [*adapters, *experts, rank, out], with LoRA's scale in it; [] for a change of
        full rank, which is x · down.
    gain: [*adapters, out of all maps], the relative change of the base map's own product (DoRA), or
        None.
    is_stack: whether there is an axis of adapters, from which `StepContext.adapters` chooses; else
        all tokens have the one adapter (static).
    axis: in one device's share of a map whose inputs are divided, the mesh axis, else None
        (static).
    """

    def __init__(
        self,
        down: Any,
        ups: Sequence[Any],
        gain: Any = None,
        *,
        is_stack: bool = False,
        axis: str | None = None,
    ) -> None:
        self.down = nnx.LoRAParam(down)
        self.ups = nnx.List([nnx.LoRAParam(up) for up in ups])
        self.gain = nnx.data(None if gain is None else nnx.LoRAParam(gain))
        self.is_stack, self.axis = is_stack, axis

    @property
    def rank(self) -> int:
        """The rank of each map's change; of a change of full rank, the number of outputs."""
        return int(self.ups[0].get_value().shape[-2] if self.ups else self.outputs)

    @property
    def outputs(self) -> int:
        """The total number of output channels of all maps."""
        lasts = self.ups or [self.down]
        return sum(int(last.get_value().shape[-1]) for last in lasts)

    @property
    def arrays(self) -> tuple[Any, list[Any], Any]:
        """The arrays: down, ups and gain."""
        gain = None if self.gain is None else self.gain.get_value()
        return self.down.get_value(), [up.get_value() for up in self.ups], gain

    def map(self, function: Any, **static: Any) -> LowRank:
        """The change with `function` applied to each array. static: static fields to replace."""
        down, ups, gain = self.arrays
        fields = {"is_stack": self.is_stack, "axis": self.axis} | static
        new_gain = None if gain is None else function(gain)
        return LowRank(function(down), [function(up) for up in ups], new_gain, **fields)

    def add(
        self, y: jax.Array, x: Activations, context: StepContext, bias: jax.Array | None = None
    ) -> jax.Array:
        """The base maps' outputs y [..., out] plus the change for x [..., in], in y's dtype.

        bias: of the base maps, contained in y; DoRA's gain does not apply to it.
        """
        if self.gain is None and self.is_stack and self.ups:
            return self._added(y[None], x, context)[0]
        wide = y.astype(jnp.float32)
        return (wide + self._rest(wide, x, context, bias)).astype(y.dtype)

    def add_terms(
        self, terms: jax.Array, x: Activations, context: StepContext, bias: jax.Array | None = None
    ) -> jax.Array:
        """As `add` for terms [splits, ..., out]: changes one term in place, or appends one."""
        if self.gain is None and self.is_stack and self.ups:
            return self._added(terms, x, context)
        wide = terms.astype(jnp.float32)
        rest = self._rest(wide.sum(0) if self.gain is not None else wide, x, context, bias)
        return jnp.concatenate([wide, rest[None]])

    def is_in_kernels(self, context: StepContext) -> bool:
        """Whether kernels compute the change: rows choose from a stack, without DoRA's gains."""
        is_plain = self.gain is None and self.is_stack and bool(self.ups)
        return is_plain and context.adapters is not None

    def gated(
        self, x: Activations, kernel: QuantizedTensor, context: StepContext, activation: str
    ) -> jax.Array:
        """activation(gate) · up of x · kernel plus the change, if `is_in_kernels`; in x's dtype."""
        operands = self._operands(x, context)
        return gated_low_rank(operands[0], kernel, *operands[1:], activation=activation)

    def terms(self, x: Activations, kernel: QuantizedTensor, context: StepContext) -> jax.Array:
        """Terms [splits, ..., out] of x · kernel plus the change."""
        if not self.is_in_kernels(context):
            return self.add_terms(matmul_terms(x, kernel), x, context)
        operands = self._operands(x, context)
        return matmul_low_rank_terms(operands[0], kernel, *operands[1:], axis=self.axis)

    def change(self, x: jax.Array, context: StepContext) -> jax.Array:
        """The change float32 [..., out] for x [..., in], without the gain."""
        if not self.is_stack:
            return self.products(x, None)
        if self.ups:
            none = jnp.zeros((1, *x.shape[:-1], self.outputs), jnp.float32)
            return self._added(none, x, context)[0]
        return self.products(x, self._numbers(x.shape[:-1], context))[..., 0, :]

    def products(self, x: jax.Array, numbers: jax.Array | None) -> jax.Array:
        """Changes float32 [..., k, out] by k entries of a stack for each token.

        x: [..., in] or [..., k, in]. numbers: int32 [..., k], indices from 1 of the entries
        [adapters · experts], 0 for none; or None for one adapter without experts, whose changes are
        [..., out].
        """
        down, ups, _ = self.arrays
        inner = _product(x, down, numbers)
        if self.axis is not None:
            inner = add_over_devices(inner, self.axis)
        if not ups:
            return inner
        parts = jnp.split(inner, len(ups), -1)
        found = [
            _product(part.astype(x.dtype), up, numbers) for part, up in zip(parts, ups, strict=True)
        ]
        return found[0] if len(found) == 1 else jnp.concatenate(found, -1)

    def of_experts(self, x: jax.Array, experts: jax.Array, context: StepContext) -> jax.Array:
        """Changes float32 [..., k, out] of a token's experts int32 [..., k], −1 for none.

        x: [..., in] or [..., k, in].
        """
        numbers = experts + 1
        if self.is_stack:
            chosen = self._numbers(experts.shape[:-1], context)
            entries = (chosen - 1) * self.down.get_value().shape[1] + numbers
            numbers = jnp.where((chosen > 0) & (experts >= 0), entries, 0)
        return self.products(x, numbers)

    def look_up(self, tokens: jax.Array, context: StepContext) -> jax.Array:
        """The change float32 [..., hidden] of an embedding at token ids int [...].

        The input channels of `down` are the token ids.
        """
        down, ups, _ = self.arrays
        if not self.is_stack:
            inner = down[tokens].astype(jnp.float32)
            return _product(inner, ups[0], None) if ups else inner
        numbers = self._numbers(tokens.shape, context)[..., 0]
        inner = jnp.where((numbers > 0)[..., None], down[numbers - 1, tokens], 0)
        return _product(inner, ups[0], numbers[..., None])[..., 0, :] if ups else inner

    def _rest(
        self, y: jax.Array, x: Activations, context: StepContext, bias: jax.Array | None
    ) -> jax.Array:
        """The change including the gain, for base outputs y float32 [..., out] with bias."""
        assert isinstance(x, jax.Array)  # `activations` asks for 16 bits beside an adapter
        change = self.change(x, context)
        if self.gain is None:
            return change
        gain = self.gain.get_value().astype(jnp.float32)
        if self.is_stack:
            numbers = self._numbers(x.shape[:-1], context)[..., 0]
            gain = jnp.where((numbers > 0)[..., None], gain[numbers - 1], 0)
        gain = jax.lax.broadcast_to_rank(gain, y.ndim)
        if bias is not None:
            y = y - jax.lax.broadcast_to_rank(bias.astype(jnp.float32), y.ndim)
        return change + gain * y

    def _added(self, terms: jax.Array, x: Activations, context: StepContext) -> jax.Array:
        """Adds a stack's changes, without the gain, to one of the terms [splits, ..., out]."""
        if context.adapters is None:
            return terms
        return add_low_rank(terms, *self._operands(x, context), axis=self.axis)

    def _operands(
        self, x: Activations, context: StepContext
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:
        """For the kernels: x, a stack's first and second factors, and each token's adapter."""
        assert isinstance(x, jax.Array)  # `activations` asks for 16 bits beside an adapter
        down, ups, _ = self.arrays
        rows = self._numbers(x.shape[:-1], context)[..., 0]
        return x, down.astype(x.dtype), [up.astype(x.dtype) for up in ups], rows

    def _numbers(self, shape: tuple[int, ...], context: StepContext) -> jax.Array:
        """The adapter of each token, int32 [*shape, 1], from 1; 0 for none."""
        chosen = context.adapters_of(shape)
        none = jnp.zeros(shape, jnp.int32)
        return (none if chosen is None else chosen.astype(jnp.int32))[..., None]


def _product(x: jax.Array, factor: jax.Array, numbers: jax.Array | None) -> jax.Array:
    """The float32 product of x and a factor, or of x and the chosen entries of stacked factors."""
    if numbers is None:
        return in_rows(x.astype(factor.dtype), factor, jnp.float32)
    return product(x, factor.reshape(-1, *factor.shape[-2:]), numbers)


def attach(model: Any, changes: Mapping[str, LowRank]) -> Any:
    """The model with changes at the paths of its linear maps and tables; arrays are shared.

    A path is that of a LinearPlace, such as `layers.0.attention.qkv`, or `embedding`, or `head`.
    """
    model = jax.tree.map(lambda array: array, model)
    for path, change in changes.items():
        node: Any = getattr(model, "share", model)  # of a divided model, one device's share
        *parents, name = path.split(".")
        for part in parents:
            node = node[int(part)] if part.isdigit() else getattr(node, part)
        if parents:
            node = getattr(node, name)
            node.adapter = change
        else:
            setattr(node, f"{name}_adapter", change)
    return model


def read_numbers(model: Any, adapters: Any, batch: int) -> jax.Array:
    """The adapter indices of `batch` sequences, int32 [batch], for a model with stacked adapters.

    Raises ValueError for another shape or dtype, for a model without a stack, and, if values are
    known, for indices out of range.
    """
    found = (module for _, module in nnx.iter_modules(model) if isinstance(module, LowRank))
    most = max((len(each.down.get_value()) for each in found if each.is_stack), default=None)
    if most is None:
        raise ValueError("the model has no adapters to choose from: take lm.adapted")
    adapters = as_array("adapters", adapters)
    if adapters.shape != (batch,) or not jnp.issubdtype(adapters.dtype, jnp.integer):
        raise ValueError(f"adapters are {shown(adapters)}: expected integers of shape ({batch},)")
    if not are_between(adapters, 0, most):
        raise ValueError(f"adapters must be from 0, for none, to {most}")
    return adapters.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model and its adapters' changes, as arguments of a program.

    changes: by the paths of linear maps, as for `attach`.
    """

    model: Any
    changes: dict[str, LowRank]

    @property
    def joined(self) -> Any:
        """The model with the changes attached."""
        return attach(self.model, self.changes)
