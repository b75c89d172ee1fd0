"""The kernel: its launch, and what its producer and consumers do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.persistent_kernel.assembly import SUMS_LAYOUT, run
from benchmarks.persistent_kernel.barriers import arrive, copy_slot, initialise, mark_time, wait
from benchmarks.persistent_kernel.exchange import (
    finish_down,
    finish_inner,
    finish_output,
    wait_for_all,
)
from benchmarks.persistent_kernel.fixed_point import load_norm, load_x
from benchmarks.persistent_kernel.layout import (
    BLOCK,
    CONSUMERS,
    DOWN,
    GATE_UP,
    GROUPS,
    HIDDEN,
    IN_FLIGHT,
    INNER_WRITTEN,
    INTERMEDIATE,
    MARKS,
    OUTPUT,
    OUTPUT_WRITTEN,
    PHASES,
    PROGRAMS,
    ROW_BYTES,
    SLOT_ROWS,
    SLOTS,
    Phase,
)
from benchmarks.persistent_kernel.products import multiply, store_sums
from mpjax.kernels import QuantizedTensor


class Results(NamedTuple):
    """The arrays that the kernel writes.

    out: float32 [1, 4096]. stream: bfloat16 [1, 4096]. given_up: int32 [1], the waits that gave
    up; others are wrong unless it is 0. inner, squares: what programs tell each other: bfloat16
    [12288], float32 [PROGRAMS]. clocks: int32 [PROGRAMS, marks], cycles at each of MARKS.
    """

    out: Any
    stream: Any
    given_up: Any
    inner: Any
    squares: Any
    clocks: Any


@functools.partial(jax.jit, static_argnames=("epsilon", "is_early", "lag", "without", "in_flight"))
def layer(
    x: jax.Array,
    residual: jax.Array,
    norm: jax.Array,
    output: QuantizedTensor,
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    counters: jax.Array,
    *,
    epsilon: float,
    is_early: bool = False,
    lag: int = 0,
    without: str | None = None,
    in_flight: int = IN_FLIGHT,
) -> Results:
    """The products of a layer after attention.

    x, residual: bfloat16 [1, 4096]: of attention, and of the residual stream.
    norm: bfloat16 [4096], the weight of the norm.
    output, gate_up, down: `uint4:g128` with float16 scales, of Qwen3-8B's shapes.
    counters: int32 [COUNTERS] of zeros, in memory that no kernel uses at the same time. The kernel
        counts there, and leaves zeros.
    is_early: whether the kernel is launched before the one before has ended, and copies words while
        it waits for x. No kernel may write the weights.
    lag: nanoseconds, times a number of the program below 8, that a program sleeps before it writes
        what others wait for: for tests.
    without: one of PARTS, which the kernel leaves out; its results are wrong then.
    in_flight: slots of a program that are copied at a time.

    Raises ValueError for other shapes and formats.
    """
    shapes = {"output": (HIDDEN, HIDDEN), "gate_up": (HIDDEN, 2 * INTERMEDIATE)}
    shapes["down"] = INTERMEDIATE, HIDDEN
    for (name, shape), weight in zip(shapes.items(), (output, gate_up, down), strict=True):
        found = f"{weight.format} {weight.shape} {weight.scale_dtype}"
        if found != (expected := f"uint4:g128 {shape} float16"):
            raise ValueError(f"{name}: found {found}: expected {expected}")
    weights = (output, gate_up, down)
    call: Any = plgpu.kernel(
        functools.partial(_kernel, epsilon, is_early, lag, without, in_flight),
        out_type=Results(
            jax.ShapeDtypeStruct((1, HIDDEN), jnp.float32),
            jax.ShapeDtypeStruct((1, HIDDEN), jnp.bfloat16),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((INTERMEDIATE,), jnp.bfloat16),
            jax.ShapeDtypeStruct((PROGRAMS,), jnp.float32),
            jax.ShapeDtypeStruct((PROGRAMS, len(MARKS)), jnp.int32),
        ),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "words": plgpu.SMEM((SLOTS, SLOT_ROWS, ROW_BYTES // 2), jnp.uint16),
            "parameters": plgpu.SMEM((SLOTS, GROUPS * SLOT_ROWS), jnp.uint32),
            "digits": plgpu.SMEM((INTERMEDIATE // BLOCK, 2, 2, BLOCK // 2), jnp.uint8),
            "steps": plgpu.SMEM((INTERMEDIATE // BLOCK, GROUPS), jnp.float32),
            "sums": plgpu.SMEM((CONSUMERS * max(p.tiles for p in PHASES) * 64,), jnp.float32),
            "barriers": plgpu.SMEM((2, SLOTS, 2), jnp.uint32),
        },
        kernel_name="persistent_layer",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    arrays = [array for weight in weights for array in (weight.words, weight.parameters)]
    with jax.enable_x64(False):  # the indices of kernels are int32
        return Results(*call(x, residual, norm, *arrays, counters))


def _kernel(
    epsilon: float,
    is_early: bool,
    lag: int,
    without: str | None,
    in_flight: int,
    *references: Any,
    **shared: Any,
) -> None:
    x, residual, norm, *arrays = references[:9]
    weights = list(zip(arrays[::2], arrays[1::2], strict=True))
    counters, results = references[9], Results(*references[10:])
    own, index = Shared(**shared), jax.lax.axis_index("program")
    program = Program(weights, counters, own, without, in_flight)
    warpgroup = jax.lax.axis_index("warpgroup")

    def mark(name: str) -> None:
        run(mark_time(), results.clocks.at[index, pl.ds(MARKS.index(name), 1)])

    run(initialise(), own.full, own.free)

    @pl.when(warpgroup == CONSUMERS)
    def _produce() -> None:
        mark("copies begin")
        program.produce(0, OUTPUT, 0)
        mark("output copied")
        program.produce(1, GATE_UP, OUTPUT.slots)
        mark("gate_up copied")
        program.produce(2, DOWN, OUTPUT.slots + GATE_UP.slots)
        mark("down copied")

    @pl.when(warpgroup < CONSUMERS)
    def _consume() -> None:
        mark("begin")
        if is_early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        outputs = pl.ds(index * OUTPUT.outputs, OUTPUT.outputs)
        stream, squares = results.stream.at[0, outputs], results.squares.at[pl.ds(index, 1)]
        inner = results.inner.at[pl.ds(index * GATE_UP.outputs, GATE_UP.outputs)]
        counts = without != "counters"

        run(load_x(HIDDEN), x, own.digits, own.steps)
        mark("x")
        program.multiply(warpgroup, OUTPUT, 0)
        mark("output")
        old = residual.at[0, outputs]
        run(finish_output(lag), own.sums, old, stream, squares, counters)
        mark("output told")
        run(wait_for_all(OUTPUT_WRITTEN, PROGRAMS if counts else 0), counters)
        mark("output of all")
        fixed = own.digits, own.steps
        run(load_norm(epsilon), results.stream, *fixed, results.squares, norm)
        mark("norm")
        program.multiply(warpgroup, GATE_UP, OUTPUT.slots)
        mark("gate_up")
        run(finish_inner(lag), own.sums, inner, counters)
        mark("inner told")
        warps = PROGRAMS * GATE_UP.outputs // 32
        run(wait_for_all(INNER_WRITTEN, warps if counts else 0), counters)
        mark("inner of all")
        run(load_x(INTERMEDIATE), results.inner, own.digits, own.steps)
        mark("inner")
        program.multiply(warpgroup, DOWN, OUTPUT.slots + GATE_UP.slots)
        mark("down")
        out = results.out.at[0, outputs]
        run(finish_down(), own.sums, out, counters, results.given_up)
        mark("end")


class Shared(NamedTuple):
    """References to shared memory.

    words: uint16 [SLOTS, rows, 64]. parameters: uint32 [SLOTS, 2 · rows].
    digits: uint8 [48, 2, 2, 128]: the two digits of x, for each block of K. The bytes of 8 lanes of
        words are together, in the order of the codes in words: those of even nibbles in the first
        half of the third axis, and those of odd ones in the second.
    steps: float32 [48, 2]: what a unit of the digits stands for, for each group.
    sums: float32, what warps add up in the end.
    barriers: [2, SLOTS], each of two words: a slot's copies have arrived, and its warpgroup has
        read it.
    """

    words: Any
    parameters: Any
    digits: Any
    steps: Any
    sums: Any
    barriers: Any

    @property
    def full(self) -> Any:
        """The barriers of slots whose copies have arrived."""
        return self.barriers.at[0]

    @property
    def free(self) -> Any:
        """The barriers of slots that have been read."""
        return self.barriers.at[1]


class Program(NamedTuple):
    """The shared memory and barriers of a program's warpgroups.

    weights: pairs of words [K blocks, N, 64] and parameters [K / 128, N].
    without: the part of the kernel that is left out, or None.
    in_flight: slots that are copied at a time.
    """

    weights: Sequence[tuple[Any, Any]]
    counters: Any
    shared: Shared
    without: str | None
    in_flight: int

    def produce(self, number: int, phase: Phase, first: int) -> None:
        """Copies all slots of product `number`, each as soon as it is free.

        first: the step of the product's first slot.
        """
        words, parameters = self.weights[number]
        shared, outputs = self.shared, words.shape[1]
        copy = copy_slot(phase, outputs, copies=self.without != "copies")
        first_output = jax.lax.axis_index("program") * phase.outputs

        def go_on(step: jax.Array, _: None) -> None:
            slot, turn = jax.lax.rem(step, SLOTS), jax.lax.div(step, SLOTS)
            is_used = (turn > 0).astype(jnp.int32)
            free = shared.free.at[slot]
            run(wait(warp=True), free, self.counters, scalars=(turn + 1, is_used))
            before = jnp.maximum(step - self.in_flight, 0)
            has_before = (step >= self.in_flight).astype(jnp.int32)
            turn_before = jax.lax.div(before, SLOTS)
            full = shared.full.at[jax.lax.rem(before, SLOTS)]
            run(wait(warp=True), full, self.counters, scalars=(turn_before, has_before))
            block = jax.lax.div(step - first, phase.halves) * phase.blocks
            output = first_output
            if phase.halves > 1:
                output += jax.lax.rem(step - first, phase.halves) * (outputs // phase.halves)
            run(
                copy,
                words.at[block, pl.ds(output, 1)],
                parameters.at[block * GROUPS, pl.ds(output, 1)],
                shared.words.at[slot],
                shared.parameters.at[slot],
                shared.full.at[slot],
            )

        jax.lax.fori_loop(first, first + phase.slots, go_on, None)

    def multiply(self, warpgroup: jax.Array, phase: Phase, first: int) -> None:
        """Multiplies a warpgroup's slots of a product, and leaves its sums in shared memory.

        first: the step of the product's first slot, a multiple of CONSUMERS.
        """
        shared = self.shared

        def go_on(number: jax.Array, sums: jax.Array) -> jax.Array:
            own = number * CONSUMERS + warpgroup
            step = first + own
            slot, turn = jax.lax.rem(step, SLOTS), jax.lax.div(step, SLOTS)
            full, one = shared.full.at[slot], jnp.int32(1)
            run(wait(warp=False), full, self.counters, scalars=(turn, one))
            block = jax.lax.div(own, phase.halves) * phase.blocks
            references = (
                shared.words.at[slot],
                shared.parameters.at[slot],
                shared.digits.at[block],
                shared.steps.at[block],
            )
            if self.without != "products":
                sums = run(multiply(phase), *references, sums=sums)
            run(arrive(), shared.free.at[slot])
            return sums

        zeros = jnp.zeros((phase.tiles * 64,), jnp.float32)  # two for each thread and tile
        sums = plgpu.layout_cast(zeros, SUMS_LAYOUT)
        sums = jax.lax.fori_loop(0, phase.slots // CONSUMERS, go_on, sums)
        run(store_sums(phase), shared.sums, sums=sums, returns=False)
