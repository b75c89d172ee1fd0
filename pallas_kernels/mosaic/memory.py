"""Tiles of a kernel of Mosaic GPU in shared memory and registers, copies of them, and barriers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS
from mpjax.kernels.target import current_target

SWIZZLED_BYTES = 128  # of a row of a tile that `wgmma` reads, at most

Barrier = plgpu.Barrier
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
copy_in = plgpu.copy_gmem_to_smem

layouts = plgpu.Layout
# Until JAX 0.10 an index comes apart from its reference.
_index = inspect.signature(plgpu.load).parameters.get("idx")
_is_old = _index is not None and _index.default is inspect.Parameter.empty


def shared(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, columns: int | None = None
) -> Any:
    """Tiles [..., rows, columns] in shared memory, swizzled as `wgmma` reads them.

    columns: of a part that is read at a time; all unless given.
    """
    size = jnp.dtype(dtype).itemsize
    row = math.gcd(SWIZZLED_BYTES, (columns or shape[-1]) * size)
    tiling: Any = plgpu.TilingTransform  # which JAX declares as abstract
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, row // size)), swizzle(row)))


def shared_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """Rows in shared memory, as they lie in global memory."""
    return plgpu.SMEM(shape, dtype)


def load_row(ref: Any) -> jax.Array:
    """Values [64], one for each of a tile's channels, in the threads that have these.

    Of any memory: each thread loads its own.
    """
    return _load(ref, layouts.WGMMA.reduce(1), optimized=False)


def load_column(ref: Any) -> jax.Array:
    """Values [rows] as sums [64, rows] of a warpgroup: those of a row are alike."""
    values = _load(ref, layouts.WGMMA.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(values, (WARPGROUP_OUTPUTS, *values.shape), (1,))


def load(ref: Any, *, layout: Any = None) -> jax.Array:
    """A tile [64, columns] in registers, as `wgmma` has operand and sums; or in `layout`."""
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
    """How a tile [64, columns] lies in registers: a thread's are four bytes of a channel."""
    return layouts.WGMMA_8BIT if jnp.dtype(dtype).itemsize == 1 else layouts.WGMMA


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sums [64, rows] of nothing, in the registers of a warpgroup."""
    tile = jnp.zeros(shape, dtype)
    return tile if current_target().is_interpreted else plgpu.layout_cast(tile, layouts.WGMMA)


def send(
    tile: jax.Array, ref: Any, received: Any, *, axis: str | None = None, program: int = 0
) -> None:
    """Writes sums [64, rows] to shared memory, and arrives at a barrier when they are there.

    axis: of a cluster, of whose `program` memory and barrier are meant; without it, this one's.
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
    """Writes sums [channels, rows] to a tile [rows, channels] in shared memory."""
    if current_target().is_interpreted:
        ref[...] = tile.T
        return
    ref.transpose((1, 0))[...] = plgpu.layout_cast(tile, layouts.WGMMA_TRANSPOSED)


def copy_out(tile: Any, target: Any) -> None:
    """Begins to write a tile in shared memory, which was stored to before, to global memory.

    What of it lies outside of the array is left out.
    """
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def wait_for_stores() -> None:
    """Waits until all tiles of this warpgroup have been read from shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
