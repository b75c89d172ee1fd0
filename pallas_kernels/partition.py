"""The division of a packed tensor among the devices of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mpjax.kernels.checks import require_type, shown
from mpjax.kernels.quantized_tensor import QuantizedTensor

# One or several names of mesh axes that divide an axis of an array; None: not divided.
AxisNames = str | tuple[str, ...] | None


def partition_specs(
    tensor: QuantizedTensor,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    k: AxisNames = None,
    n: AxisNames = None,
    leading: tuple[AxisNames, ...] | None = None,
) -> QuantizedTensor:
    """The tensor with a `PartitionSpec` instead of each array, for `jax.shard_map`.

    A shard is itself a packed tensor. Divided along K, a shard multiplies its own input channels of
    x, and `jax.lax.psum` adds up the products (row-parallel). Divided along N, shards compute
    different output channels (column-parallel).

    tensor: a QuantizedTensor of arrays, or of shapes such as `jax.eval_shape` returns.
    k, n: names of the mesh axes that divide the input channels and the output channels.
    leading: names of the mesh axes that divide each of the leading axes; None divides none.

    Raises ValueError for axes that the mesh does not have or that are named twice, for shards that
    are not equal, and for shards along K that are not whole blocks or whose tensor has padding or a
    permutation.
    """
    require_type("partition_specs: tensor", tensor, QuantizedTensor)
    stack, (input_channels, output_channels) = tensor.shape[:-2], tensor.shape[-2:]
    leading = (None,) * len(stack) if leading is None else leading
    require_type("partition_specs: leading", leading, tuple, hint=" of names, or None")
    if len(leading) != len(stack):
        raise ValueError(
            f"partition_specs: leading names {len(leading)} axes, and the tensor has {len(stack)} "
            f"in front of K and N (shape {tensor.shape}): expected a name or None for each"
        )
    counts = _Counts(mesh)
    for name, size in zip(leading, stack, strict=True):
        counts.require_equal_shards("leading", name, size, "matrices")
    counts.require_equal_shards("n", n, output_channels, "output channels")
    if (count := counts.take("k", k)) > 1:
        _require_blocks(tensor, input_channels, count)

    def spec(array: jax.Array | None, *matrix_axes: AxisNames) -> PartitionSpec | None:
        return None if array is None else PartitionSpec(*leading, *matrix_axes)

    # If one group has all input channels, every shard along K needs its parameters. The K of flat
    # words is their last axis.
    groups = None if tensor.format.group_size is None else k
    words = (None, n, k) if tensor.format.is_flat else (k, n, None)
    specs: dict[str, Any] = {
        "words": spec(tensor.words, *words),
        "parameters": spec(tensor.parameters, groups, n),
        "permutation": spec(tensor.permutation, None),
        "channel_scales": spec(tensor.channel_scales, n),
        "table": spec(tensor.table, None),
        "activation_bits": spec(tensor.activation_bits, groups),
        "activation_scale": spec(tensor.activation_scale, None),
    }
    return dataclasses.replace(tensor, **specs)


def _require_blocks(tensor: QuantizedTensor, input_channels: int, count: int) -> None:
    """Raises ValueError unless K can be divided into `count` equal shards of whole blocks."""
    reason = None
    if tensor.permutation is not None:
        reason = "has a permutation of all of them: a shard would need the others' x"
    elif tensor.padding:
        reason = f"pads its last block with {tensor.padding} more: shards would not be equal"
    elif input_channels % (count * tensor.format.block):
        reason = f"has them in blocks of {tensor.format.block}, which shards can't divide"
    if reason is not None:
        raise ValueError(
            f"partition_specs: {input_channels} input channels can't be divided among {count} "
            f"shards, as the {tensor.format} tensor {reason}; divide the output channels (n) "
            "instead"
        )


class _Counts:
    """The numbers of shards along the axes of a mesh, each of which can be used only once."""

    def __init__(self, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh):
        require_type("partition_specs: mesh", mesh, jax.sharding.Mesh, jax.sharding.AbstractMesh)
        self.free = dict(mesh.shape)
        self.names = ", ".join(map(repr, self.free))

    def take(self, argument: str, names: AxisNames) -> int:
        """The number of shards along the named axes, which count as used from now on.

        argument: of `partition_specs`, for messages. Raises ValueError for unknown and used axes.
        """
        count = 1
        for name in names if isinstance(names, tuple) else (names,):
            if name is None:
                continue
            if not isinstance(name, str) or name not in self.free:
                raise ValueError(
                    f"partition_specs: {argument} names {shown(name)}, which is no axis of the "
                    f"mesh, or is named twice: expected each of {self.names} once at most"
                )
            count *= self.free.pop(name)
        return count

    def require_equal_shards(self, argument: str, names: AxisNames, size: int, things: str) -> None:
        """Takes the named axes, and raises ValueError unless they divide `size` equally.

        things: what is divided, for messages, in the plural.
        """
        if size % (count := self.take(argument, names)):
            raise ValueError(
                f"partition_specs: {size} {things} can't be divided among {count} shards equally "
                f"({argument} names {shown(names)})"
            )
