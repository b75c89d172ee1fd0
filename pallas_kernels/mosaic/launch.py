"""Launches Mosaic GPU kernels, and divides registers between their warpgroups.

A program has some consumer warpgroups, which compute, and optionally one producer warpgroup, which
only begins copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mpjax.kernels.mosaic.decoding import Warpgroups
from mpjax.kernels.target import current_target, tracing_for
from mpjax.kernels.varying_axes import vary_alike

PRODUCER_REGISTERS = 32  # of each thread of the producer
_REGISTERS = 65536 // 128  # of a multiprocessor, over the threads of a warpgroup
_MOST_REGISTERS = 248  # of a thread: 255, rounded down to the multiple of 8 that `setmaxnreg` takes


def registers_per_thread(warpgroups: int) -> int:
    """The registers of a thread in each of `warpgroups` consumers, beside one producer.

    At the launch all threads get the same number. Then the producer keeps PRODUCER_REGISTERS and
    gives the rest of its registers to the consumers.
    """
    each = _REGISTERS // (warpgroups + 1) // 8 * 8
    return min(
        _MOST_REGISTERS, (each * (warpgroups + 1) - PRODUCER_REGISTERS) // warpgroups // 8 * 8
    )


def can_give_registers(version: tuple[int, ...] = jax.__version_info__) -> bool:
    """Whether warpgroups can give each other registers.

    version: of JAX. Since 0.12, JAX compiles kernels with nvJitLink, as if other compilation units
        followed. Then `setmaxnreg` is ignored (docs/kernels/warpgroups.md).
    """
    return version < (0, 12)


def why_slow() -> str | None:
    """The reason why products may be slower than in the measurements, or None."""
    if can_give_registers():
        return None
    return (
        "since JAX 0.12, warpgroups can't give each other registers, and products of many rows run "
        "in another form, which was not measured: mpjax's extras cuda12 and cuda13 take 'jax<0.12'"
    )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The programs of a kernel, by named axes, and the warpgroups of each.

    axes: programs along each axis; the last axis varies fastest.
    warpgroups: of a program.
    cluster: further axes, whose programs run at the same time and can write to each other's shared
        memory. Not in interpret mode.
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
    """Launches a kernel, which runs once in each of a program's warpgroups.

    The kernel gets references to the arguments and the output by position, and to `scratch` by
    name. The index of the axis "warpgroup" is the warpgroup in which it runs.

    scratch: types of references to shared memory and barriers.
    interpret: run as plain JAX, traced for the current target.
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
        num_threads=grid.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(scratch),
        kernel_name=name,
        **options,
    )
    with jax.enable_x64(False):  # the indices of kernels are int32
        result: jax.Array = call(*arguments)
    # Under `shard_map`, Mosaic's output does not vary along the mesh axes of its arguments.
    return vary_alike((result, *arguments))[0]


def _interpreter() -> Any:
    # The class has no public name before JAX 0.11.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # Copies may read outside of an array; the values read there are never stored.
    return InterpretGPUParams(out_of_bounds_reads="uninitialized")


def give_registers() -> None:
    """Gives registers to the consumers; the producer calls this first."""
    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")


def take_registers(warpgroups: int) -> None:
    """Takes the producer's registers; each of `warpgroups` consumers calls this first."""
    plgpu.set_max_registers(registers_per_thread(warpgroups), action="increase")
