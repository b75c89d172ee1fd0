"""Applies folds: divides the outputs of one parameter of a layer, multiplies the rows of the next.

`models.config.Fold` says where in a layer this leaves the outputs as they are, and where channels
may be put in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models import FusedLinear, Linear
from mpjax.models.layers import LayerNorm
from mpjax.models.maps import Fold
from mpjax.models.parameters import find


def linear_of(layer: nnx.Module, path: str) -> Linear:
    """The Linear at a path; the only part of a FusedLinear."""
    node = find(layer, path)
    return node.parts[0] if isinstance(node, FusedLinear) else node


def is_of_experts(layer: nnx.Module, fold: Fold) -> bool:
    """Whether the source is a stack of experts' maps, so that each expert has its own scales."""
    source = find(layer, fold.source)
    return isinstance(source, Linear) and source.kernel.get_value().ndim > 2


def tie(fold: Fold, scales: jax.Array) -> jax.Array:
    """The scales [K] of a fold's target, made equal for rows that read the same source channel.

    Query heads that share a value head read the same channels, and a channel can be divided by one
    scale only: the geometric mean of the scales of its copies.
    """
    if fold.repeats is None:
        return scales
    mean = jnp.exp(jnp.log(scales.reshape(fold.repeats)).mean(1, keepdims=True))
    return jnp.broadcast_to(mean, fold.repeats).reshape(-1)


def permute(layer: nnx.Module, fold: Fold, order: jax.Array) -> None:
    """Puts the outputs of a fold's source into another order, and its target's rows.

    The fold is elementwise, or from heads to their copies, within which channels move then.

    order: int32 [K], of experts [experts, K]; channel i becomes what channel order[i] was. Changes
        the layer, whose kernels are plain arrays, and no output of it.
    """
    target, source = linear_of(layer, fold.target), linear_of(layer, fold.source)
    target.kernel.set_value(_in_order(target.kernel.get_value(), order, -2))
    outputs = source.kernel.get_value().shape[-1]
    if fold.repeats is None:
        parts = jnp.arange(0, outputs, order.shape[-1])
        of_outputs = jnp.concatenate([begin + order for begin in parts], -1)
    else:
        sizes = _part_sizes(find(layer, fold.source), outputs, outputs)
        of_outputs = _within_heads(order, fold.repeats, sum(sizes[: fold.part]), outputs)
    source.kernel.set_value(_in_order(source.kernel.get_value(), of_outputs, -1))
    if source.bias is not None:
        source.bias.set_value(_in_order(source.bias.get_value(), of_outputs, -1))


def _within_heads(
    order: jax.Array, repeats: tuple[int, int, int], begin: int, outputs: int
) -> jax.Array:
    """The order of all outputs of which those from `begin` on are heads that have copies.

    order: int32 [K] of the copies, the same for all copies of a head.
    """
    heads, _, channels = repeats
    firsts = begin + jnp.arange(heads)[:, None] * channels
    own = firsts + order.reshape(repeats)[:, 0] % channels
    return jnp.arange(outputs).at[begin : begin + own.size].set(own.reshape(-1))


def _in_order(array: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """An array whose entries along an axis are in an order [..., n], of each expert its own."""
    if order.ndim == 1:
        return jnp.take(array, order, axis=axis)
    return jax.vmap(lambda own, order: jnp.take(own, order, axis=axis))(array, order)


def apply(layer: nnx.Module, fold: Fold, scales: jax.Array) -> None:
    """Divides the outputs of a fold's source by scales, and multiplies the rows of its target.

    layer: changed in place; its kernels are plain arrays, and each parameter keeps its dtype.
    scales: float32 [K], one for each row of the target, as `tie` returns them; [experts, K] if the
        source is a stack of experts' maps.
    """
    for path in fold.readers:
        _scale_inputs(layer, path, scales)
    inverse = 1 / scales
    if fold.repeats is not None:
        inverse = inverse.reshape(fold.repeats)[:, 0].reshape(-1)
    source = find(layer, fold.source)
    if not isinstance(source, Linear | FusedLinear):  # a norm
        bias = source.bias if isinstance(source, LayerNorm) else None
        for parameter in filter(None, (source.weight, bias)):
            parameter.set_value(_times(parameter.get_value(), inverse))
        return
    linear = linear_of(layer, fold.source)
    outputs = linear.kernel.get_value().shape[-1]
    if fold.part is not None:
        begin = sum(_part_sizes(source, outputs, inverse.shape[-1])[: fold.part])
        ones = jnp.ones((*inverse.shape[:-1], outputs), jnp.float32)
        inverse = ones.at[..., begin : begin + inverse.shape[-1]].set(inverse)
    linear.kernel.set_value(_times(linear.kernel.get_value(), inverse[..., None, :]))
    if linear.bias is not None:
        linear.bias.set_value(_times(linear.bias.get_value(), inverse))


def _part_sizes(source: Linear | FusedLinear, outputs: int, size: int) -> Sequence[int]:
    """The sizes of the maps that a source joins: those of one map of experts are alike."""
    return source.sizes if isinstance(source, FusedLinear) else (size,) * (outputs // size)


def _scale_inputs(layer: nnx.Module, path: str, scales: jax.Array) -> None:
    """Multiplies the rows of a linear map's kernel, or the columns of an array [outputs, K]."""
    node = find(layer, path)
    if isinstance(node, Linear | FusedLinear):
        rows = linear_of(layer, path).kernel
        rows.set_value(_times(rows.get_value(), scales[..., None]))
    else:
        node.set_value(_times(node.get_value(), scales))


def _times(array: jax.Array, factors: jax.Array) -> jax.Array:
    """The product in float32, in the dtype of the array; factors have its last axes."""
    return (array.astype(jnp.float32) * jnp.broadcast_to(factors, array.shape)).astype(array.dtype)
