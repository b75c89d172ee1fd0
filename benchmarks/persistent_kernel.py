"""The products of a layer after attention as one persistent kernel, for one row: an experiment.

    stream = residual + x · output
    inner = silu(gate) · up, of [gate, up] = norm(stream) · gate_up
    out = inner · down

All programs run at the same time, one on each multiprocessor. Each computes whole output channels
of every product: 32 of `output`, 96 each of gate and up, and 32 of `down`. Between products,
programs count in global memory that their channels are written, and wait until all have.

A producer warpgroup streams the words of all three products through one ring of slots in shared
memory. Words depend on no other program, so that it does not stop between products: while the
consumers wait, the next words arrive.

Consumers take slots in turn. A warp multiplies 16 output channels at a time by `mma.sync` of 8-bit
integers, so that codes are operands after a shift and a mask. x is rounded to fixed point for that:
15 bits for each group of input channels, and their sign, as two digits of 7 bits. The sums of `mma`
are 16 × 8, for 8 rows of x. There is one, so that columns say something else:

- A row of words has 128 bytes. So that a warp's loads touch all banks, odd output channels read the
  half of their row that even ones don't, and odd columns have x of that half.
- Columns 0, 1, 4 and 5 have the first digit of x, the others the second one.
- Columns 0 to 3 have x of a block's first group, and zeros in place of the other's; columns 4 to 7
  are the other way round.

Sums are exact integers. A product with ones gives the sum of x, which is multiplied with the zero
point.

Waits are bounded: after so many polls, a warp goes on, and the kernel says so in its output.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.mosaic import memory

HIDDEN, INTERMEDIATE = 4096, 12288
PROGRAMS = 128
CONSUMERS = 4  # warpgroups; even ones have the gate's channels, odd ones the up product's
THREADS = 128 * CONSUMERS  # of consumers
# Slots that are copied at a time. Memory needs about 25 kB for each program. With more, whatever a
# program writes or reads in global memory queues behind its copies.
IN_FLIGHT = 4
# Parts that a kernel can leave out, so that the rest is measured.
PARTS = "products", "copies", "counters"
SLOTS = 15  # of the ring: as many as fit
BLOCK = 256  # input channels of a row of words, which has a nibble of each of four planes
ROW_BYTES, PLANES, GROUPS = 128, 4, 2  # of a row of words
WARP_OUTPUTS = 32  # output channels of two pairs of warps; a pair shares 16, with half a row each
DIGIT = 128  # of x
LARGEST = 127 * DIGIT  # of a group's x in fixed point
MAGIC = 3 << 22  # as a float: an integer below 2**22, added to its bits, is added to the float
POLLS = 1 << 14  # of a wait, until it gives up; each takes about a microsecond

# Counters in global memory. They are zeros between launches.
_OUTPUT_WRITTEN, _INNER_WRITTEN, _PROGRAMS_DONE, _WAITS_GIVEN_UP = range(4)
COUNTERS = 4
_CONSUMERS_BARRIER, _PROGRAM_BARRIER = 14, 15  # named barriers that Mosaic does not use

# Where the clock is read: by the first consumer, and by the producer.
MARKS = (
    "begin",
    "x",
    "output",
    "output told",
    "output of all",
    "norm",
    "gate_up",
    "inner told",
    "inner of all",
    "inner",
    "down",
    "end",
    "copies begin",
    "output copied",
    "gate_up copied",
    "down copied",
)


class Phase(NamedTuple):
    """How a product is cut into slots.

    outputs: channels of a slot. blocks: of K in a slot. slots: of the product in a program.
    halves: 2 where slots with channels of a first and a second matrix take turns.
    """

    outputs: int
    blocks: int
    slots: int
    halves: int = 1

    @property
    def tiles(self) -> int:
        """The number of tiles of 16 output channels that a warp multiplies."""
        return self.outputs // WARP_OUTPUTS


OUTPUT = Phase(HIDDEN // PROGRAMS, 2, HIDDEN // BLOCK // 2)
GATE_UP = Phase(INTERMEDIATE // PROGRAMS, 1, 2 * HIDDEN // BLOCK, halves=2)
DOWN = Phase(HIDDEN // PROGRAMS, 3, INTERMEDIATE // BLOCK // 3)
PHASES = OUTPUT, GATE_UP, DOWN
_ROWS = max(phase.outputs * phase.blocks for phase in PHASES)  # of words in a slot


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
            "words": plgpu.SMEM((SLOTS, _ROWS, ROW_BYTES // 2), jnp.uint16),
            "parameters": plgpu.SMEM((SLOTS, GROUPS * _ROWS), jnp.uint32),
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
        _run(_mark(), results.clocks.at[index, pl.ds(MARKS.index(name), 1)])

    _run(_initialise(), own.full, own.free)

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

        _run(_load_x(HIDDEN), x, own.digits, own.steps)
        mark("x")
        program.multiply(warpgroup, OUTPUT, 0)
        mark("output")
        old = residual.at[0, outputs]
        _run(_finish_output(lag), own.sums, old, stream, squares, counters)
        mark("output told")
        _run(_wait_for_all(_OUTPUT_WRITTEN, PROGRAMS if counts else 0), counters)
        mark("output of all")
        fixed = own.digits, own.steps
        _run(_load_norm(epsilon), results.stream, *fixed, results.squares, norm)
        mark("norm")
        program.multiply(warpgroup, GATE_UP, OUTPUT.slots)
        mark("gate_up")
        _run(_finish_inner(lag), own.sums, inner, counters)
        mark("inner told")
        warps = PROGRAMS * GATE_UP.outputs // 32
        _run(_wait_for_all(_INNER_WRITTEN, warps if counts else 0), counters)
        mark("inner of all")
        _run(_load_x(INTERMEDIATE), results.inner, own.digits, own.steps)
        mark("inner")
        program.multiply(warpgroup, DOWN, OUTPUT.slots + GATE_UP.slots)
        mark("down")
        out = results.out.at[0, outputs]
        _run(_finish_down(), own.sums, out, counters, results.given_up)
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
        copy = _copy_slot(phase, outputs, copies=self.without != "copies")
        first_output = jax.lax.axis_index("program") * phase.outputs

        def go_on(step: jax.Array, _: None) -> None:
            slot, turn = jax.lax.rem(step, SLOTS), jax.lax.div(step, SLOTS)
            is_used = (turn > 0).astype(jnp.int32)
            free = shared.free.at[slot]
            _run(_wait(warp=True), free, self.counters, scalars=(turn + 1, is_used))
            before = jnp.maximum(step - self.in_flight, 0)
            has_before = (step >= self.in_flight).astype(jnp.int32)
            turn_before = jax.lax.div(before, SLOTS)
            full = shared.full.at[jax.lax.rem(before, SLOTS)]
            _run(_wait(warp=True), full, self.counters, scalars=(turn_before, has_before))
            block = jax.lax.div(step - first, phase.halves) * phase.blocks
            output = first_output
            if phase.halves > 1:
                output += jax.lax.rem(step - first, phase.halves) * (outputs // phase.halves)
            _run(
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
            _run(_wait(warp=False), full, self.counters, scalars=(turn, one))
            block = jax.lax.div(own, phase.halves) * phase.blocks
            references = (
                shared.words.at[slot],
                shared.parameters.at[slot],
                shared.digits.at[block],
                shared.steps.at[block],
            )
            if self.without != "products":
                sums = _run(_multiply(phase), *references, sums=sums)
            _run(_arrive(), shared.free.at[slot])
            return sums

        zeros = jnp.zeros((phase.tiles * 64,), jnp.float32)  # two for each thread and tile
        sums = plgpu.layout_cast(zeros, _SUMS_LAYOUT)
        sums = jax.lax.fori_loop(0, phase.slots // CONSUMERS, go_on, sums)
        _run(_store_sums(phase), shared.sums, sums=sums, returns=False)


_SUMS_LAYOUT = memory.layouts.WGMMA.reduce(1)


class Assembly(NamedTuple):
    """PTX whose operands are named `{0}`, `{1}`, …: references first, then scalars.

    Sums are `{s0}`, `{s1}`, …, which the PTX reads and, where it is to return any, changes.
    """

    text: str


def _run(
    assembly: Assembly,
    *references: Any,
    scalars: Sequence[jax.Array] = (),
    sums: jax.Array | None = None,
    returns: bool = True,
) -> Any:
    """Runs PTX with the addresses of references, scalars of 32 bits, and sums; returns the sums."""
    scalar = memory.layouts.WG_SPLAT(())
    kinds: list[Any] = [plgpu.RefType()] * len(references) + [scalar] * len(scalars)
    values = [*references, *scalars]
    return_type = None
    if sums is not None:
        kinds, values = [*kinds, _SUMS_LAYOUT], [*values, sums]
        if returns:
            return_type = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=_SUMS_LAYOUT)
    emit = functools.partial(_emit, assembly, sums is not None, return_type is not None)
    run = plgpu.inline_mgpu(
        arg_types=tuple(kinds), return_type=() if return_type is None else return_type
    )
    return run(emit)(*values)


def _emit(assembly: Assembly, has_sums: bool, returns: bool, context: Any, *values: Any) -> Any:
    sums = values[-1] if has_sums else None
    inputs = [_operand(value) for value in (values[:-1] if has_sums else values)]
    # A register of sums is a vector of one element.
    registers = [] if sums is None else list(sums.registers.flat)
    floats = [vector.extract(register, [], [0]) for register in registers]
    outputs = len(floats) if returns else 0
    # Operands are numbered: outputs, then inputs, then the old values of the outputs.
    names = {f"s{i}": f"${i if returns else len(inputs) + i}" for i in range(len(floats))}
    numbers = [f"${outputs + i}" for i in range(len(inputs))]
    text = "{\n" + assembly.text.format(*numbers, **names) + "\n}"
    of_type = ["l" if value.type == ir.IntegerType.get_signless(64) else "r" for value in inputs]
    old = [str(i) for i in range(outputs)] if returns else ["f"] * len(floats)
    constraints = ",".join(["=f"] * outputs + of_type + old + ["~{memory}"])
    float32 = ir.F32Type.get()
    result_type = None
    if outputs:
        result_type = llvm.StructType.get_literal([float32] * outputs)
    found = llvm.inline_asm(
        result_type, [*inputs, *floats], text, constraints, has_side_effects=True, asm_dialect=0
    )
    if not returns:
        return ()
    assert sums is not None
    one = ir.VectorType.get((1,), float32)
    results = np.empty_like(sums.registers)
    for number, index in enumerate(np.ndindex(results.shape)):
        value = llvm.extractvalue(float32, found, [number])
        results[index] = vector.broadcast(one, value)
    return mosaic_gpu.FragmentedArray(_registers=results, _layout=sums.layout, _is_signed=None)


def _operand(value: Any) -> ir.Value:
    """The address of a reference (32 bits in shared memory, else 64), or a scalar's register."""
    if isinstance(value, mosaic_gpu.FragmentedArray):
        return value.registers.item()
    is_shared = mosaic_gpu.utils.is_smem_ref(value)
    address = ir.IntegerType.get_signless(32 if is_shared else 64)
    return llvm.ptrtoint(address, mosaic_gpu.utils.memref_ptr(value))


def _float(value: float) -> str:
    """A float32 literal of PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _list(prefix: str, numbers: Iterable[int]) -> str:
    """Names of registers in braces, doubled for `str.format`."""
    return "{{" + ", ".join(f"{prefix}{number}" for number in numbers) + "}}"


# ---- barriers and copies --------------------------------------------------------------------


def _initialise() -> Assembly:
    """Sets up the barriers `{0}` (full) and `{1}` (free), for all warpgroups."""
    return Assembly(f"""
        .reg .b32 thread, place;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.lt.u32 first, thread, {SLOTS};
        mad.lo.u32 place, thread, 8, {{0}};
        @first mbarrier.init.shared::cta.b64 [place], 1;
        mad.lo.u32 place, thread, 8, {{1}};
        @first mbarrier.init.shared::cta.b64 [place], 4;
        fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta;
        bar.sync {_PROGRAM_BARRIER}, {THREADS + 128};""")


def _wait(*, warp: bool) -> Assembly:
    """Waits for the phase of barrier `{0}` with the parity of `{2}`, if `{3}`; `{1}`: counters.

    warp: whether only the warpgroup's first warp waits.
    """
    skip = (
        """
        mov.u32 polls, %tid.x;
        and.b32 polls, polls, 127;
        setp.ge.u32 done, polls, 32;
        @done bra end;"""
        if warp
        else ""
    )
    return Assembly(f"""
        .reg .b32 polls, parity;
        .reg .pred done;{skip}
        setp.eq.u32 done, {{3}}, 0;
        @done bra end;
        and.b32 parity, {{2}}, 1;
        mov.u32 polls, 0;
    again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [{{0}}], parity, 1000;
        @done bra end;
        add.u32 polls, polls, 1;
        setp.lt.u32 done, polls, {POLLS};
        @done bra again;
        red.global.add.u32 [{{1}} + {4 * _WAITS_GIVEN_UP}], 1;
    end:""")


def _arrive() -> Assembly:
    """Arrives at barrier `{0}`, once for each warp."""
    return Assembly("""
        .reg .b32 lane;
        .reg .b64 state;
        .reg .pred first;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first mbarrier.arrive.shared::cta.b64 state, [{0}];""")


def _copy_slot(phase: Phase, outputs: int, *, copies: bool) -> Assembly:
    """Begins the copies of a slot, whose barrier `{4}` ends a phase when all have arrived.

    `{0}`, `{1}`: the first row of words, and the first parameter, in a matrix of so many output
    channels; `{2}`, `{3}`: the slot's words and parameters. Each of some threads begins a copy.

    copies: whether there are any.
    """
    rows = phase.outputs
    nbytes = (ROW_BYTES + 4 * GROUPS) * rows * phase.blocks
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    begin = f"@!is_other {copy} [to], [from], nbytes, [{{4}}];" if copies else ""
    return Assembly(f"""
        .reg .b32 thread, to, place, nbytes;
        .reg .b64 from, other, state;
        .reg .pred is_other, is_first, is_words;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 is_first, thread, 0;
        @is_first mbarrier.arrive.expect_tx.shared::cta.b64 state, [{{4}}], {nbytes * copies};
        bar.warp.sync 0xffffffff;
        setp.ge.u32 is_other, thread, {(1 + GROUPS) * phase.blocks};
        setp.lt.u32 is_words, thread, {phase.blocks};
        mad.lo.u32 to, thread, {ROW_BYTES * rows}, {{2}};
        mad.wide.u32 from, thread, {ROW_BYTES * outputs}, {{0}};
        sub.u32 thread, thread, {phase.blocks};
        mad.lo.u32 place, thread, {4 * rows}, {{3}};
        mad.wide.u32 other, thread, {4 * outputs}, {{1}};
        selp.b32 to, to, place, is_words;
        selp.b64 from, from, other, is_words;
        selp.b32 nbytes, {ROW_BYTES * rows}, {4 * rows}, is_words;
        {begin}""")


def _mark() -> Assembly:
    """Writes the clock to `{0}`, by the first consumer and by the producer."""
    return Assembly("""
        .reg .b32 thread, now;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 511;
        setp.eq.u32 first, thread, 0;
        mov.u32 now, %clock;
        @first st.global.u32 [{0}], now;""")


# ---- products -------------------------------------------------------------------------------


def _multiply(phase: Phase) -> Assembly:
    """Adds a slot's products to the sums, two for each tile.

    `{0}`: words; `{1}`: parameters; `{2}`: digits of x; `{3}`: their steps. A lane has the sums of
    two channels with one digit of x, over one of the groups of each block, and over one half of the
    lanes of words.
    """
    rows = phase.outputs
    # quad, part: the lane's row of the operands in registers, and its place in a row. Its column of
    # x's operand has the same number as its row.
    parts = [
        """
        .reg .b32 lane, warp, quad, part, place, row, words, parameters, digits, steps, mask;
        .reg .pred is_odd, is_second, is_low;
        .reg .b32 x<8>, w<8>, a<4>, u, ones, d<4>, m;
        .reg .f32 scale, offset, total, step, unit;
        .reg .b16 low, high;
        mov.b32 ones, 0x01010101;""",
        f"mov.b32 m, {_float(MAGIC)};",
        """
        mov.u32 lane, %laneid;
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        shr.u32 quad, lane, 2;
        and.b32 part, lane, 3;
        and.b32 row, warp, 1;
        mad.lo.u32 row, row, 16, quad;
        bfe.u32 place, warp, 1, 1;
        add.u32 place, place, quad;
        and.b32 place, place, 1;
        mad.lo.u32 place, place, 4, part;
        shl.b32 place, place, 4;
        mad.lo.u32 words, row, 128, {0};
        add.u32 words, words, place;
        add.u32 place, place, {2};
        bfe.u32 u, quad, 1, 1;
        mad.lo.u32 digits, u, 256, place;
        setp.ge.u32 is_second, quad, 4;
        selp.b32 mask, 0xFF00FF00, 0x00FF00FF, is_second;
        shr.u32 place, part, 1;
        mad.lo.u32 steps, place, 4, {3};""",
        f"""
        mad.lo.u32 row, place, {rows}, row;
        mad.lo.u32 parameters, row, 4, {{1}};
        and.b32 place, part, 1;
        setp.ne.u32 is_low, place, 0;
        selp.f32 unit, 0f3F800000, {_float(DIGIT)}, is_low;
        and.b32 place, quad, 1;
        setp.ne.u32 is_odd, place, 0;""",
    ]
    for block in range(phase.blocks):
        for odd in range(2):
            to = _list("x", range(4 * odd, 4 * odd + 4))
            parts.append(f"ld.shared.v4.b32 {to}, [digits + {2 * BLOCK * block + 128 * odd}];")
        parts += [f"and.b32 x{i}, x{i}, mask;" for i in range(8)]
        parts += [f"ld.shared.f32 step, [steps + {4 * GROUPS * block}];"]
        parts += ["mul.f32 step, step, unit;"]
        parts += [_mma(["ones"] * 4, word) for word in range(4)]
        parts += ["selp.b32 u, d1, d0, is_odd;", "mov.b32 total, u;"]
        parts += [f"sub.f32 total, total, {_float(MAGIC)};"]
        for tile in range(phase.tiles):
            first = ROW_BYTES * (rows * block + WARP_OUTPUTS * tile)
            for lower in range(2):
                to = _list("w", range(4 * lower, 4 * lower + 4))
                parts.append(f"ld.shared.v4.b32 {to}, [words + {first + 8 * ROW_BYTES * lower}];")
            for word in range(4):
                for lower in range(2):
                    source = f"w{4 * lower + word}"
                    parts.append(f"and.b32 a{lower}, {source}, 0x0F0F0F0F;")
                    parts.append(f"shr.u32 u, {source}, 4;")
                    parts.append(f"and.b32 a{2 + lower}, u, 0x0F0F0F0F;")
                parts.append(_mma([f"a{number}" for number in range(4)], word))
            for lower in range(2):
                place = 4 * (rows * GROUPS * block + WARP_OUTPUTS * tile + 8 * lower)
                parts.append(_scale(f"{{s{2 * tile + lower}}}", lower, place))
    return Assembly(_lines(parts))


def _mma(left: Sequence[str], word: int) -> str:
    """Multiplies operands with x of two lanes of words; the first product begins with MAGIC."""
    sums = _list("d", range(4))
    old = "{{m, m, m, m}}" if word == 0 else sums
    operand = "{{" + ", ".join(left) + "}}"
    return (
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        f"{sums}, {operand}, {{{{x{word}, x{4 + word}}}}}, {old};"
    )


def _scale(sums: str, lower: int, place: int) -> str:
    """Adds scale · step · (sum − zero · total of x) of a channel's group to its sums."""
    # The zero point below 2**16 becomes a float as the last bits of 2**23.
    return f"""
        ld.shared.b32 u, [parameters + {place}];
        mov.b32 {{{{low, high}}}}, u;
        cvt.f32.f16 scale, low;
        mul.f32 scale, scale, step;
        prmt.b32 u, u, 0x4B00, 0x5432;
        mov.b32 offset, u;
        sub.f32 offset, {_float(2.0**23)}, offset;
        selp.b32 u, d{2 * lower + 1}, d{2 * lower}, is_odd;
        fma.rn.f32 offset, offset, total, u;
        sub.f32 offset, offset, {_float(MAGIC)};
        fma.rn.f32 {sums}, scale, offset, {sums};"""


def _store_sums(phase: Phase) -> Assembly:
    """Writes the sums to `{0}` [consumers, tiles, warps, 16]. Then consumers meet."""
    stores = []
    for tile in range(phase.tiles):
        for lower in range(2):
            stores.append(f"mov.f32 value, {{s{2 * tile + lower}}};")
            for lanes in (1, 2):
                stores.append(f"shfl.sync.bfly.b32 other, value, {lanes}, 31, 0xffffffff;")
                stores.append("add.f32 value, value, other;")
            stores.append(f"@first st.shared.f32 [place + {256 * tile + 32 * lower}], value;")
    return Assembly(f"""
        .reg .b32 thread, part, place;
        .reg .f32 value, other;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        and.b32 part, thread, 3;
        setp.eq.u32 first, part, 0;
        shr.u32 part, thread, 7;
        mad.lo.u32 place, part, {256 * phase.tiles}, {{0}};
        bfe.u32 part, thread, 5, 2;
        mad.lo.u32 place, part, 64, place;
        bfe.u32 part, thread, 2, 3;
        mad.lo.u32 place, part, 4, place;
        {_lines(stores)}
        bar.sync {_CONSUMERS_BARRIER}, {THREADS};""")


_PLACE = """
        shr.u32 place, thread, 5;
        mad.lo.u32 place, place, 256, {0};
        and.b32 lane, thread, 31;
        mad.lo.u32 place, lane, 4, place;"""  # of a channel, the number of a thread, in the sums


def _add_sums(phase: Phase, to: str, consumers: Iterable[int]) -> str:
    """Adds what warps have written of the channel at `place`."""
    places = [256 * phase.tiles * each + 128 * half for each in consumers for half in range(2)]
    loads = [
        f"ld.shared.f32 value, [place + {place}];\nadd.f32 {to}, {to}, value;" for place in places
    ]
    return _lines([f"mov.f32 {to}, 0f00000000;", *loads])


# ---- between products -----------------------------------------------------------------------


def _signal(counter: str, number: int) -> str:
    """Counts a warp whose lanes have written."""
    return f"""
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first fence.acq_rel.gpu;
        @first red.relaxed.gpu.global.add.u32 [{counter} + {4 * number}], 1;"""


def _sleep(lag: int) -> str:
    """Sleeps `lag` nanoseconds times a number below 8, that of the program."""
    if not lag:
        return ""
    return f"""
        mov.u32 lane, %ctaid.x;
        mul.lo.u32 lane, lane, 5;
        and.b32 lane, lane, 7;
        mul.lo.u32 lane, lane, {lag};
        nanosleep.u32 lane;"""


def _finish_output(lag: int) -> Assembly:
    """Writes a program's channels of the stream, and the sum of their squares.

    `{0}`: sums; `{1}`: residual; `{2}`: stream; `{3}`: of the program in the squares; `{4}`:
    counters. The first warp does it.
    """
    butterfly = _lines(
        f"shfl.sync.bfly.b32 other, square, {lanes}, 31, 0xffffffff;\n"
        "add.f32 square, square, other;"
        for lanes in (16, 8, 4, 2, 1)
    )
    return Assembly(f"""
        .reg .b32 thread, place, lane;
        .reg .b64 at, offset;
        .reg .b16 half;
        .reg .f32 value, total, old, square, other;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, 32;
        @first bra end;{_sleep(lag)}
        {_PLACE}
        {_add_sums(OUTPUT, "total", range(CONSUMERS))}
        mul.wide.u32 offset, thread, 2;
        add.u64 at, {{1}}, offset;
        ld.global.b16 half, [at];
        cvt.f32.bf16 old, half;
        add.f32 total, total, old;
        cvt.rn.bf16.f32 half, total;
        add.u64 at, {{2}}, offset;
        st.global.b16 [at], half;
        cvt.f32.bf16 total, half;
        mul.f32 square, total, total;
        {butterfly}
        setp.eq.u32 first, thread, 0;
        @first st.global.f32 [{{3}}], square;
        {_signal("{4}", _OUTPUT_WRITTEN)}
    end:""")


def _finish_inner(lag: int) -> Assembly:
    """Writes silu(gate) · up of a program's channels; `{0}`: sums; `{1}`: inner; `{2}`: counters.

    A thread has a channel.
    """
    return Assembly(f"""
        .reg .b32 thread, place, lane;
        .reg .b64 at, offset;
        .reg .b16 half;
        .reg .f32 value, gate, up, power;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, {GATE_UP.outputs};
        @first bra end;{_sleep(lag)}
        {_PLACE}
        {_add_sums(GATE_UP, "gate", range(0, CONSUMERS, 2))}
        {_add_sums(GATE_UP, "up", range(1, CONSUMERS, 2))}
        mul.f32 power, gate, {_float(-1.4426950408889634)};
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 power, power;
        mul.f32 gate, gate, power;
        mul.f32 gate, gate, up;
        cvt.rn.bf16.f32 half, gate;
        mul.wide.u32 offset, thread, 2;
        add.u64 at, {{1}}, offset;
        st.global.b16 [at], half;
        {_signal("{2}", _INNER_WRITTEN)}
    end:""")


def _finish_down() -> Assembly:
    """Writes a program's channels of the result. The last program makes counters zeros.

    `{0}`: sums; `{1}`: out; `{2}`: counters; `{3}`: the number of waits that gave up.
    """
    zeros = _lines(f"st.global.u32 [{{2}} + {4 * number}], 0;" for number in range(COUNTERS))
    return Assembly(f"""
        .reg .b32 thread, place, lane, count;
        .reg .b64 at, offset;
        .reg .f32 value, total;
        .reg .pred first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 first, thread, 32;
        @first bra end;
        {_PLACE}
        {_add_sums(DOWN, "total", range(CONSUMERS))}
        mul.wide.u32 offset, thread, 4;
        add.u64 at, {{1}}, offset;
        st.global.f32 [at], total;
        setp.ne.u32 first, thread, 0;
        @first bra end;
        atom.acq_rel.gpu.global.add.u32 count, [{{2}} + {4 * _PROGRAMS_DONE}], 1;
        setp.ne.u32 first, count, {PROGRAMS - 1};
        @first bra end;
        ld.relaxed.gpu.global.u32 count, [{{2}} + {4 * _WAITS_GIVEN_UP}];
        st.global.u32 [{{3}}], count;
        {zeros}
    end:""")


def _wait_for_all(number: int, count: int) -> Assembly:
    """Waits until a counter of `{0}` has reached `count`, for all consumers of a program."""
    return Assembly(f"""
        .reg .b32 thread, found, polls;
        .reg .pred done;
        mov.u32 thread, %tid.x;
        setp.ne.u32 done, thread, 0;
        @done bra end;
        mov.u32 polls, 0;
    again:
        ld.relaxed.gpu.global.u32 found, [{{0}} + {4 * number}];
        setp.ge.u32 done, found, {count};
        @done bra end;
        add.u32 polls, polls, 1;
        setp.lt.u32 done, polls, {POLLS};
        @done bra again;
        red.global.add.u32 [{{0}} + {4 * _WAITS_GIVEN_UP}], 1;
    end:
        fence.acq_rel.gpu;
        bar.sync {_CONSUMERS_BARRIER}, {THREADS};""")


_LOAD = "ld.relaxed.gpu.global.v4.b32"  # what other programs have written is in the L2 cache


def _load_x(channels: int) -> Assembly:
    """Writes x `{0}` in fixed point to digits `{1}` and steps `{2}`, for all consumers."""
    loads = (f"{_LOAD} {_list('v', _plane(i))}, [at + {128 * i}];" for i in range(PLANES))
    return _fixed(channels, _lines(loads), "")


def _load_norm(epsilon: float) -> Assembly:
    """Writes the norm of stream `{0}` in fixed point to digits `{1}` and steps `{2}`.

    `{3}`: the squares; `{4}`: the norm's weight. For all consumers of a program.
    """
    loads = [
        f"""
        {_LOAD} {_list("v", _plane(i))}, [at + {128 * i}];
        ld.global.v4.b32 {_list("n", _plane(i))}, [weight + {128 * i}];"""
        for i in range(PLANES)
    ]
    scaled = [
        f"""
        shl.b32 low, v{i}, 16;
        and.b32 high, v{i}, 0xFFFF0000;
        mul.f32 low, low, total;
        mul.f32 high, high, total;
        shl.b32 other, n{i}, 16;
        mul.f32 low, low, other;
        and.b32 other, n{i}, 0xFFFF0000;
        mul.f32 high, high, other;
        cvt.rn.bf16x2.f32 v{i}, high, low;"""
        for i in range(4 * PLANES)
    ]
    mean = f"""
        mov.u32 other, %laneid;
        mad.wide.u32 weight, other, 16, {{3}};
        ld.relaxed.gpu.global.v4.f32 {_list("f", range(4))}, [weight];
        add.f32 total, f0, f1;
        add.f32 f2, f2, f3;
        add.f32 total, total, f2;
        {_over_lanes("add", "total", (16, 8, 4, 2, 1))}
        fma.rn.f32 total, total, {_float(1 / HIDDEN)}, {_float(epsilon)};
        rsqrt.approx.ftz.f32 total, total;
        add.u64 weight, offset, {{4}};"""
    return _fixed(HIDDEN, mean + _lines(loads), _lines(scaled))


def _plane(number: int) -> range:
    """Registers with x of a plane, of 8 lanes of words."""
    return range(4 * number, 4 * number + 4)


def _over_lanes(operation: str, value: str, lanes: Iterable[int]) -> str:
    """Joins a float of lanes whose numbers differ by some bits."""
    return _lines(
        f"shfl.sync.bfly.b32 other, {value}, {each}, 31, 0xffffffff;\n"
        f"{operation}.f32 {value}, {value}, other;"
        for each in lanes
    )


def _fixed(channels: int, load: str, change: str) -> Assembly:
    """Writes bfloat16 values to digits `{1}` and steps `{2}`. A thread has 8 lanes of words.

    load: PTX that loads pairs of values to v0 … v15, from `at` on, `offset` behind `{0}`.
    change: PTX that changes them.
    """
    wide = []
    for i in range(4 * PLANES):
        wide.append(f"shl.b32 q{2 * i}, v{i}, 16;")
        wide.append(f"and.b32 q{2 * i + 1}, v{i}, 0xFFFF0000;")
    scale = []
    for group in range(GROUPS):
        scale.append(f"mov.f32 most, {_float(1e-30)};")
        own = range(16 * group, 16 * group + 16)
        for i in own:
            scale += [f"abs.f32 other, q{i};", "max.f32 most, most, other;"]
        scale.append(_over_lanes("max", "most", (1, 2, 4)))
        scale.append(f"mul.f32 step{group}, most, {_float(1 / LARGEST)};")
        scale.append(f"rcp.approx.f32 most, step{group};")
        scale += [f"fma.rn.f32 q{i}, q{i}, most, {_float(MAGIC)};" for i in own]
    stores = []
    for digit in range(2):
        if digit == 0:
            stores += [f"shr.u32 h{i}, q{i}, 7;" for i in range(32)]
        else:
            stores += [f"and.b32 h{i}, q{i}, {DIGIT - 1};" for i in range(32)]
        for odd in range(2):
            for word in range(4):
                for i in range(2):  # lanes of a word
                    first, second = (8 * (odd + plane) + 2 * word + i for plane in (0, 2))
                    stores.append(f"prmt.b32 v{i}, h{first}, h{second}, 0x0040;")
                stores.append(f"prmt.b32 n{word}, v0, v1, 0x5410;")
            place = 256 * digit + 128 * odd
            stores.append(f"st.shared.v4.b32 [to + {place}], {_list('n', range(4))};")
    return Assembly(f"""
        .reg .b32 thread, lanes, to, place, v<16>, n<16>, q<32>, h<32>, low, high, other;
        .reg .f32 total, f<4>, most, step<2>;
        .reg .b64 at, offset, weight;
        .reg .pred is_other, is_first;
        mov.u32 thread, %tid.x;
        setp.ge.u32 is_other, thread, {channels // 32};
        @is_other bra end;
        shr.u32 place, thread, 3;
        and.b32 lanes, thread, 7;
        setp.eq.u32 is_first, lanes, 0;
        shl.b32 lanes, lanes, 4;
        mad.lo.u32 to, place, {2 * BLOCK}, lanes;
        cvt.u64.u32 offset, to;
        add.u64 at, offset, {{0}};
        add.u32 to, to, {{1}};
        mad.lo.u32 place, place, {4 * GROUPS}, {{2}};
        {load}
        {change}
        {_lines(wide)}
        {_lines(scale)}
        @is_first st.shared.v2.f32 [place], {{{{step0, step1}}}};
        {_lines(stores)}
    end:
        bar.sync {_CONSUMERS_BARRIER}, {THREADS};""")
