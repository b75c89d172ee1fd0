"""Tiles of Mosaic GPU kernels: their memory and layouts, loads, stores, copies and barriers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS
from mpjax.kernels.target import current_target

SWIZZLED_BYTES = 128  # the longest row of a swizzled tile that `wgmma` reads

Barrier = plgpu.Barrier
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
copy_in = plgpu.copy_gmem_to_smem

layouts = plgpu.Layout
# Up to JAX 0.10, `plgpu.load` takes the index as a separate argument.
_index = inspect.signature(plgpu.load).parameters.get("idx")
_is_old = _index is not None and _index.default is inspect.Parameter.empty


def shared(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, columns: int | None = None
) -> Any:
    """The scratch type of tiles [..., rows, columns] in shared memory, swizzled for `wgmma`.

    columns: the number of columns that are read at a time; None for all.
    """
    size = jnp.dtype(dtype).itemsize
    row = math.gcd(SWIZZLED_BYTES, (columns or shape[-1]) * size)
    tiling: Any = plgpu.TilingTransform  # JAX declares it as abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, row // size)), swizzle(row)))


def shared_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """The scratch type of an array in shared memory in row-major order, not swizzled."""
    return plgpu.SMEM(shape, dtype)


def load_row(ref: Any) -> jax.Array:
    """Loads values [64], one for each output channel of a tile [64, columns].

    ref: in shared or global memory. Each thread loads the values of its own channels.
    """
    return _load(ref, layouts.WGMMA.reduce(1), optimized=False)


def load_column(ref: Any) -> jax.Array:
    """Loads values [rows] and broadcasts them to [64, rows], in the layout of `wgmma`'s sums."""
    values = _load(ref, layouts.WGMMA.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(values, (WARPGROUP_OUTPUTS, *values.shape), (1,))


def load(ref: Any, *, layout: Any = None) -> jax.Array:
    """Loads a tile [64, columns] into registers, in `wgmma`'s layout unless `layout` is given."""
    return _load(ref, layout or operand_layout(ref.dtype))


def _load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    if current_target().is_interpreted:
        values: jax.Array = ref[...]
        return values
    read: Any = plgpu.load
    index = ((),) if _is_old else ()
    values = read(ref, *index, layout=layout, optimized=optimized)
    return values


def operand_layout(dtype: jax.typing.DTypeLike) -> Any:
    """The layout of an operand [64, columns] of `wgmma` in registers.

    A register has four neighbouring bytes of one output channel.
    """
    return layouts.WGMMA_8BIT if jnp.dtype(dtype).itemsize == 1 else layouts.WGMMA


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Zeros [64, rows] in the layout of `wgmma`'s sums."""
    return full(shape, 0, dtype)


def full(shape: tuple[int, ...], value: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A tile [64, rows] of one value, in the layout of `wgmma`'s sums."""
    tile = jnp.full(shape, value, dtype)
    return tile if current_target().is_interpreted else plgpu.layout_cast(tile, layouts.WGMMA)


def send(
    tile: jax.Array, ref: Any, received: Any, *, axis: str | None = None, program: int = 0
) -> None:
    """Writes sums [64, rows] to shared memory, and then arrives at a barrier.

    ref, received: the memory and the barrier; of this program, or, if a cluster's `axis` is given,
        of the cluster's program at the index `program`.
    """
    if axis is None:
        ref[...] = tile
        arrive(received)
    else:
        has_index = bool(getattr(received, "transforms", ()))
        assert not has_index, "JAX 0.11 counts the index of another program's barrier twice"
        index = jnp.int32(program)
        plgpu.async_store_smem(tile, ref, received, cluster_idx=index, cluster_dim=axis)


def store_transposed(ref: Any, tile: jax.Array) -> None:
    """Writes sums [outputs, rows] to a tile [rows, outputs] in shared memory."""
    if current_target().is_interpreted:
        ref[...] = tile.T
        return
    ref.transpose((1, 0))[...] = plgpu.layout_cast(tile, layouts.WGMMA_TRANSPOSED)


def copy_out(tile: Any, target: Any) -> None:
    """Begins to copy a tile, written by this warpgroup in shared memory, to global memory.

    Elements outside of the target array are not written.
    """
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def wait_for_stores(running: int = 0) -> None:
    """Waits until the copies that this warpgroup began have read their tiles from shared memory.

    running: the number of latest copies for which it does not wait.
    """
    plgpu.wait_smem_to_gmem(running, wait_read_only=True)
