"""Launching kernels of Mosaic GPU, and how their warpgroups divide the registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.manual_axes import vary_alike
from mpjax.kernels.mosaic.decoding import Warpgroups
from mpjax.kernels.target import current_target, tracing_for

COPYING_REGISTERS = 32  # of a thread that only begins copies
_REGISTERS = 65536 // 128  # of a multiprocessor, for each thread of a warpgroup
_MOST_REGISTERS = 248  # of a thread, in whole eights


def registers_per_thread(warpgroups: int) -> int:
    """Registers that a thread can have where so many warpgroups compute, and another one copies.

    All begin with as many, and the one that copies gives most of its own away.
    """
    each = _REGISTERS // (warpgroups + 1) // 8 * 8
    return min(
        _MOST_REGISTERS, (each * (warpgroups + 1) - COPYING_REGISTERS) // warpgroups // 8 * 8
    )


def why_slow(version: tuple[int, ...] = jax.__version_info__) -> str | None:
    """Why threads may not get the registers that they take below; None if they do.

    version: of JAX. Since 0.12 nvJitLink compiles kernels, each as one compilation unit of several,
        where `setmaxnreg` is ignored, and sums are spilled (docs/compiler.md, Warpgroups).
    """
    if version < (0, 12):
        return None
    return (
        "since JAX 0.12, threads may not get the registers that they ask for: install 'jax<0.12', "
        "as mpjax's extras cuda12 and cuda13 do"
    )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The programs of a kernel, by named axes, and the warpgroups of each.

    axes: programs along each axis; the last one changes first.
    warpgroups: that compute; one more copies.
    cluster: axes beside those, whose programs run at the same time, and can write to each other's
        shared memory. Not where the kernel is interpreted.
    """

    axes: Mapping[str, int]
    warpgroups: int
    cluster: Mapping[str, int] = dataclasses.field(default_factory=dict)


def launch(
    kernel: Callable[..., None],
    *arguments: jax.Array,
    out_shape: jax.ShapeDtypeStruct,
    grid: Grid,
    scratch: Mapping[str, Any],
    name: str,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel, in each program of the grid once in each warpgroup.

    The kernel gets a reference for each argument and the output, and those of `scratch` by name; it
    asks for the axis "warpgroup" which one it is in. With `interpret` it runs as plain JAX, traced
    for the target that is current.
    """

    def run(*references: Any, **shared: Any) -> None:
        with tracing_for(current_target() if interpret else Warpgroups()):
            kernel(*references, **shared)

    parameters = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    options: dict[str, Any] = {"compiler_params": parameters}
    if interpret:
        options = {"interpret": _interpreter()}
    call: Any = plgpu.kernel(
        run,
        out_type=out_shape,
        grid=tuple(grid.axes.values()),
        grid_names=tuple(grid.axes),
        cluster=tuple(grid.cluster.values()),
        cluster_names=tuple(grid.cluster),
        num_threads=grid.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(scratch),
        kernel_name=name,
        **options,
    )
    with jax.enable_x64(False):  # kernels count in 32 bits
        result: jax.Array = call(*arguments)
    # Under `shard_map`, Mosaic forgets which axes of a mesh the arguments vary along.
    return vary_alike((result, *arguments))[0]


def _interpreter() -> Any:
    # It has no public name before JAX 0.11.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # What a copy reads outside of an array is never stored.
    return InterpretGPUParams(out_of_bounds_reads="uninitialized")


def give_registers() -> None:
    """In the warpgroup that copies, first: leaves registers to those that compute."""
    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")


def take_registers(warpgroups: int) -> None:
    """In each of the warpgroups that compute, first: takes what the other one leaves."""
    plgpu.set_max_registers(registers_per_thread(warpgroups), action="increase")
