"""Applies folds: divides the outputs of one parameter, and multiplies the next one's rows.

`models.config.Fold` lists where in a layer this doesn't change the outputs, and where channels may
be reordered.
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
    """The Linear at a path, or the only part of a FusedLinear."""
    node = find(layer, path)
    return node.parts[0] if isinstance(node, FusedLinear) else node


def is_of_experts(layer: nnx.Module, fold: Fold) -> bool:
    """Whether the source is a stack of experts, so that each expert has its own scales."""
    source = find(layer, fold.source)
    return isinstance(source, Linear) and source.kernel.get_value().ndim > 2


def tie(fold: Fold, scales: jax.Array) -> jax.Array:
    """The scales [K] of a fold's target, averaged over rows that read the same source channel.

    With grouped-query attention, several query heads read the channels of one value head, and a
    channel can have only one scale: the geometric mean over its copies.
    """
    if fold.repeats is None:
        return scales
    mean = jnp.exp(jnp.log(scales.reshape(fold.repeats)).mean(1, keepdims=True))
    return jnp.broadcast_to(mean, fold.repeats).reshape(-1)


def permute(layer: nnx.Module, fold: Fold, order: jax.Array) -> None:
    """Reorders the outputs of a fold's source and the rows of its target, in place.

    The fold is elementwise, or from heads to their copies, and then the order is within heads.

    order: int32 [K], for experts [experts, K]; channel i becomes the old channel order[i]. The
        layer's kernels must be unquantised; its outputs don't change.
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
    """The order of all of a source's outputs, of which the heads begin at `begin`.

    order: int32 [K] of the target's rows, equal in all copies of a head.
    """
    heads, _, channels = repeats
    firsts = begin + jnp.arange(heads)[:, None] * channels
    own = firsts + order.reshape(repeats)[:, 0] % channels
    return jnp.arange(outputs).at[begin : begin + own.size].set(own.reshape(-1))


def _in_order(array: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """The array permuted along an axis; order: [n], or [experts, n]."""
    if order.ndim == 1:
        return jnp.take(array, order, axis=axis)
    return jax.vmap(lambda own, order: jnp.take(own, order, axis=axis))(array, order)


def apply(layer: nnx.Module, fold: Fold, scales: jax.Array) -> None:
    """Divides the outputs of a fold's source by scales, and multiplies its readers' rows.

    layer: changed in place; its kernels are unquantised, and parameters keep their dtypes. scales:
    float32 [K], one for each row of the target, as `tie` returns them; [experts, K] if the source
    is a stack of experts.
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
    """The output sizes of the maps joined in a source; equal for a fused map of experts."""
    return source.sizes if isinstance(source, FusedLinear) else (size,) * (outputs // size)


def _scale_inputs(layer: nnx.Module, path: str, scales: jax.Array) -> None:
    """Multiplies the input channels of a linear map, or of an array [outputs, K], by scales."""
    node = find(layer, path)
    if isinstance(node, Linear | FusedLinear):
        rows = linear_of(layer, path).kernel
        rows.set_value(_times(rows.get_value(), scales[..., None]))
    else:
        node.set_value(_times(node.get_value(), scales))


def _times(array: jax.Array, factors: jax.Array) -> jax.Array:
    """The product array · factors, computed in float32, in the array's dtype."""
    return (array.astype(jnp.float32) * jnp.broadcast_to(factors, array.shape)).astype(array.dtype)
