"""Launches kernels of Mosaic GPU that write into the memory of other devices of the host.

These are ordinary writes, by NVLink where there is one: nothing is multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.varying_axes import vary_alike


def launch_on_all(
    kernel: Callable[..., None],
    x: jax.Array,
    *,
    out_shapes: tuple[jax.ShapeDtypeStruct, ...],
    programs: int,
    name: str,
) -> tuple[jax.Array, ...]:
    """Launches a kernel on all devices of a mesh, under `shard_map`.

    The kernel gets references to x and the outputs, and a semaphore for each program, which are
    zero: before it runs, JAX makes the devices wait until all have come so far. The index of the
    axis "program" says which program runs.
    """
    call: Any = plgpu.kernel(
        kernel,
        out_type=out_shapes,
        grid=(programs,),
        grid_names=("program",),
        scratch_types={"arrived": plgpu.SemaphoreType.REGULAR((programs,))},
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    with jax.enable_x64(False):  # the indices of kernels are int32
        outputs = call(x)
    return vary_alike((*outputs, x))[:-1]


def remote(reference: Any, device: jax.Array) -> Any:
    """The reference to the same array in the memory of another device of the mesh."""
    return plgpu.remote_ref(reference, device)


def signal(semaphore: Any, device: jax.Array) -> None:
    """Adds 1 to the same semaphore of another device, which sees all earlier writes then."""
    pl.semaphore_signal(semaphore, device_id=device)


def wait(semaphore: Any, count: int) -> None:
    """Waits until a semaphore of this device has been signalled `count` times."""
    pl.semaphore_wait(semaphore, count)
