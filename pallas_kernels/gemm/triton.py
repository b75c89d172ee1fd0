"""Fused dequantise-GEMM in Triton: one main loop for every packed weight format.

The kernel computes out.T = W.T · x.T, so that the weight is the operand in registers and rows of x
are the narrow side of the tensor-core instruction. A program has a tile of `tile_n` output channels
and `tile_m` rows of x, and one of `splits` ranges of K. It loads words of codes, decodes them plane
by plane to operands of the tensor cores, and multiplies. Only the decoder depends on the kind of
codes.

Scales are applied where they are cheapest. Scales of output channels and of rows are applied in the
epilogue. Scales of groups multiply the sum over the group (one operation per output and group, no
loss of precision), or the decoded weights (one per weight, rounded to 16 bits, which is cheaper for
tiles of many rows).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.integer_sums import OFFSET_BITS, as_float
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.limits import can_be_operand
from mpjax.kernels.launch import Settings, first_program_id, join, launch, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.target import current_target

# Input channels of one product. The compiler would split a product of all channels of a step in
# two, and wait for both halves before it decodes the next step (docs/kernels/products.md).
CHANNELS_PER_PRODUCT = 128


Index = tuple[jax.Array, jax.Array, jax.Array]  # of a program in a grid


class Beside(Protocol):
    """Another kernel's programs in the launch of a product: a tree of their arrays, with sizes."""

    @property
    def grid(self) -> tuple[int, ...]:
        """The numbers of programs."""

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of their result."""

    def run_beside(self, result_ref: Any, number: jax.Array) -> None:
        """In the kernel, where arrays are references, runs the program with this number."""


class Operands(NamedTuple):
    """The inputs of the kernel: arrays outside, references inside; None for missing inputs."""

    x: Any  # [M, K padded]
    x_scales: Any  # [M, 1 or groups], or [groups, M] for int8 in groups; of quantised activations
    words: Any  # [K blocks, N, columns · plane width], or [1, N, K padded]
    parameters: Any  # [groups, N]
    channel_scales: Any  # [N]
    table: Any  # [2**bits]


def matmul(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The product x [M, K] · W [K, N] in `out_dtype`; see `matmul_terms`."""
    terms = matmul_terms(x, weight, config, out_dtype, interpret=interpret)
    # XLA fuses this sum, whose order is fixed, into the product's consumer.
    return (terms[0] if terms.shape[0] == 1 else terms.sum(0)).astype(out_dtype)


# This function has its own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def matmul_terms(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    beside: Beside | None = None,
    *,
    interpret: bool = False,
) -> Any:
    """Terms [splits, M, N] whose sum over the first axis is x [M, K] · W [K, N].

    Several terms are float32; a single term has `out_dtype`. With `config.unsplit` there is a
    single term, and with `config.serial` a single float32 term, the sum of all splits. x is padded
    with zeros to whole blocks of K.

    x: bfloat16 or float16, or QuantizedActivations if the format has 8-bit activations.
    beside: programs of another kernel in the same launch, of a configuration without `unsplit`;
        then the results are the terms and the other kernel's result.
    """
    run = functools.partial(_launch, x, weight, out_dtype=out_dtype, interpret=interpret)
    if config.unsplit is None:
        return run(config, beside=beside)
    whole = run(dataclasses.replace(config, splits=1), part=(0, config.unsplit))
    if config.unsplit >= weight.shape[1]:
        return whole
    rest = run(config, part=(config.unsplit, None)).sum(0, keepdims=True).astype(out_dtype)
    # XLA compiles this to one fusion, which writes in place; `.at[].set` would take three.
    return jax.lax.dynamic_update_slice(whole, rest, (0, 0, config.unsplit))


def _launch(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    config: TritonConfig,
    *,
    out_dtype: jnp.dtype,
    interpret: bool,
    part: tuple[int, int | None] = (0, None),
    beside: Beside | None = None,
) -> Any:
    """Launches the kernel for some output channels: terms [splits, M, N − first].

    part: the first channel, and the number of channels to compute; the others are undefined. None
        computes all. beside: as in `matmul_terms`.
    """
    first, outputs = part
    values, x_scales = parts_of(x, weight.format)
    rows, columns = values.shape[0], weight.shape[1] - first
    steps = steps_of(weight, config)
    padding = weight.padded_channels - values.shape[1]
    splits = min(config.splits, steps)
    terms = 1 if config.serial else splits
    kernel = functools.partial(
        _kernel,
        format=weight.format,
        scale_dtype=weight.scale_dtype,
        config=dataclasses.replace(config, splits=splits),
        first_output=first,
    )
    operands = Operands(
        jnp.pad(values, ((0, 0), (0, padding))) if padding else values,
        x_scales,
        weight.words,
        weight.parameters,
        weight.channel_scales,
        weight.table,
    )
    product = jax.ShapeDtypeStruct(
        (terms, rows, columns), out_dtype if splits == 1 else jnp.float32
    )
    tiles = pl.cdiv(rows, config.tile_m), pl.cdiv(min(outputs or columns, columns), config.tile_n)
    others = 0 if beside is None else pl.cdiv(math.prod(beside.grid), tiles[0] * terms)
    return launch(
        kernel if beside is None else functools.partial(_kernel_beside, kernel, tiles[1]),
        operands if beside is None else (operands, beside),
        out_shape=product if beside is None else (product, beside.result),
        grid=(tiles[0], tiles[1] + others, terms),
        settings=Settings(
            f"matmul_{weight.format.codes}", warps=config.warps, stages=config.stages
        ),
        interpret=interpret,
    )


def _kernel_beside(
    kernel: Callable[..., None], tiles: int, inputs: Any, out_ref: Any, other_ref: Any
) -> None:
    """Runs the product's kernel in the first `tiles` programs of the second axis, then the other.

    inputs: the operands of both.
    """
    operands, beside = inputs
    index = row, column, split = first_program_id(), pl.program_id(1), pl.program_id(2)
    pl.when(column < tiles)(functools.partial(kernel, operands, out_ref, index=index))
    number = ((column - tiles) * pl.num_programs(2) + split) * pl.num_programs(0) + row

    @pl.when((column >= tiles) & (number < math.prod(beside.grid)))
    def _() -> None:
        beside.run_beside(other_ref, number)


def parts_of(
    x: jax.Array | QuantizedActivations, format: WeightFormat | None
) -> tuple[jax.Array, jax.Array | None]:
    """The rows of x or of its codes, [M, K], and its scales as a kernel loads them, or None.

    Scales are [M, 1], or [M, groups]; for blocks of `int4` [blocks, M].
    format: of the weight; None for a plain weight.
    """
    if isinstance(x, jax.Array):
        return x, None
    # The scales of a block are contiguous, as the kernels that round to blocks store them.
    has_blocks = format is not None and format.codes == "int4"
    return x.values, x.scales.T if has_blocks else x.scales


def steps_of(weight: QuantizedTensor, config: TritonConfig) -> int:
    """The number of steps of the loop over all of K."""
    return weight.padded_channels // (weight.format.planes * _width(weight.format, config))


def _width(format: WeightFormat, config: TritonConfig) -> int:
    return config.width or format.plane_width


def _kernel(
    operands: Operands,
    out_ref: Any,  # [splits, M, N − first]
    *,
    format: WeightFormat,
    scale_dtype: str,
    config: TritonConfig,
    first_output: int,
    index: Index | None = None,
) -> None:
    """A program of the product. index: its place in the grid; None to read it."""
    program = Program(operands, format, scale_dtype, config, first_output, index=index)
    split, splits = program.split, config.splits
    steps = operands.x.shape[1] // (format.planes * program.width)

    def sum_of(split: jax.Array | int) -> jax.Array:
        ends = split * steps // splits, (split + 1) * steps // splits
        accumulator = jax.lax.fori_loop(*ends, program.step, program.zeros)
        return program.scaled(accumulator.astype(jnp.float32))

    if config.serial:
        product = functools.reduce(jnp.add, map(sum_of, range(splits)))
    else:
        product = sum_of(split)
    row, output = program.row, program.output
    store(
        out_ref.at[split, row[:, None], (output - first_output)[None, :]],
        product.T.astype(out_ref.dtype),
        mask=(row < program.rows)[:, None] & (output < program.outputs)[None, :],
    )


class Program:
    """The tile of one program: its loads, the steps of its loop over K, and the scales after it.

    first_output: the first output channel that the launch computes. tile: the rows [tile_m] and
        output channels [tile_n] of the program; None to derive them from the program's index in the
        grid.
    index: the program's place in the grid; None to read it.
    """

    def __init__(
        self,
        operands: Operands,
        format: WeightFormat,
        scale_dtype: str,
        config: TritonConfig,
        first_output: int = 0,
        tile: tuple[jax.Array, jax.Array] | None = None,
        *,
        index: Index | None = None,
    ) -> None:
        self.operands, self.format, self.scale_dtype = operands, format, scale_dtype
        self.kind, self.target = code_kinds.of(format), current_target()
        self.dtype = operands.x.dtype
        self.rows, self.outputs = operands.x.shape[0], operands.words.shape[1]
        self.width = width = _width(format, config)
        self.parts = format.plane_width // width  # the number of steps of a block
        tile_m, tile_n = config.tile_m, config.tile_n
        if tile is None:
            row = first_program_id() if index is None else index[0]
            column = pl.program_id(1) if index is None else index[1]
            self.row = row * tile_m + jnp.arange(tile_m)
            self.output = first_output + column * tile_n + jnp.arange(tile_n)
        else:
            self.row, self.output = tile
        self.split = pl.program_id(2) if index is None else index[2]
        self.lane = jnp.arange(width)
        # There are masks only if a tile may extend beyond the matrix.
        is_inside = tile is None and self.rows % tile_m == 0
        self.row_mask = None if is_inside else self.row < self.rows
        self.output_mask = None if self.outputs % tile_n == 0 else self.output < self.outputs
        self.shared = self.kind.shared(operands.table, self.dtype, width)

        # `run` neighbouring planes, of up to `size` input channels, share a word of parameters, and
        # `scaled_run` of them a scale. If one group has all input channels, its parameters are
        # loaded here, before the loop.
        self.size = size = format.parameter_channels
        planes = format.planes
        self.run = planes if size is None else min(planes, size // format.plane_width)
        self.scaled_run = self.run // self.kind.scales_of_word
        self.whole = self.load_groups(jnp.int32(0))[0] if size is None else None
        # Decoded weights are scaled only if the operands' dtype has the range of scales.
        fits = can_be_operand(scale_dtype, self.dtype)
        has_scale = self.whole is None and self.kind.has_group_scales
        self.scale_weight = has_scale and config.scaling == "weight" and fits
        self.scale_sum = has_scale and not self.scale_weight
        decodes_scaled = self.scale_weight or not self.kind.has_group_scales
        self.exponent = self.kind.scaled_exponent(self.dtype) if decodes_scaled else 0
        # Then 8-bit rows of x have a scale for each group, too, even if K is a single group.
        self.x_by_group = self.scale_sum and self.dtype in (jnp.int8, jnp.float8_e4m3fn)

        # Only the last product of a step runs while the next step decodes. The compiler waits for
        # all others, because the next decoded planes overwrite the registers that they read.
        most = self.scaled_run if self.scale_sum else planes
        self.joined = min(most, max(1, CHANNELS_PER_PRODUCT // width))
        sum_dtype = jnp.int32 if self.dtype == jnp.int8 else jnp.float32
        self.zeros = jnp.zeros((tile_n, tile_m), sum_dtype)
        self.no_sum = self.zeros  # of a group that is scaled separately
        self.sums_blocks = self.scale_sum and self.dtype == jnp.int8  # integer sums, one per block
        if self.sums_blocks:
            self.no_sum = jnp.full((tile_n, tile_m), OFFSET_BITS, jnp.int32)
            self.zeros = jnp.zeros((tile_n, tile_m), jnp.float32)

    def load_groups(self, index: jax.Array) -> list[code_kinds.Group]:
        """The parameters of each scale in the words `index`, for the tile's output channels."""
        words = load_masked(self.operands.parameters.at[index, self.output], self.output_mask)
        return [
            self.kind.load(parameters, self.scale_dtype, self.dtype, self.width)
            for parameters in self.kind.split_parameters(words)
        ]

    def load_columns(self, block: jax.Array, lane: jax.Array) -> list[jax.Array]:
        """The words [tile_n, width] of a block at these lanes, for each of its columns."""
        format = self.format
        if format.is_flat:
            block, lane = jnp.int32(0), block * format.block + lane
        return [
            load_masked(
                self.operands.words.at[
                    block, self.output[:, None], (column * format.plane_width + lane)[None, :]
                ],
                self.output_mask,
            )
            for column in range(format.columns)
        ]

    def load_x(self, first: jax.Array, planes: int) -> jax.Array:
        """The tile of x [tile_m, planes · width] whose first plane begins at channel `first`."""
        number = jnp.arange(planes * self.width)
        if self.parts > 1:  # written so that the compiler sees contiguous lanes
            plane, lane = jax.lax.div(number, self.width), jax.lax.rem(number, self.width)
            number = plane * self.format.plane_width + lane
        row, channel = self.row[:, None], (first + number)[None, :]
        return load_masked(self.operands.x.at[row, channel], self.x_mask(channel))

    def x_mask(self, channel: jax.Array) -> jax.Array | None:
        """The mask of a tile of x: of its rows, or of its rows and channels [1, channels]."""
        return self.row_mask

    def load_x_scales(self, index: jax.Array) -> jax.Array:  # [tile_m]
        """The scales [tile_m] of the rows of a quantised x, for one group."""
        place = (index, self.row) if self.sums_blocks else (self.row, index)
        return load_masked(self.operands.x_scales.at[place], self.row_mask)

    def step(self, number: jax.Array, accumulator: jax.Array) -> jax.Array:
        """Adds the products of a step's planes to the accumulator [tile_n, tile_m]."""
        format = self.format
        block, part = number, jnp.int32(0)
        if self.parts > 1:
            block, part = number // self.parts, number % self.parts * self.width
        # Loaded before the product, as the compiler doesn't pipeline loads that no operand needs.
        x_scales = self.load_x_scales(block) if self.sums_blocks else None
        columns = self.load_columns(block, part + self.lane)
        total = accumulator
        for first in range(0, format.planes, self.joined):
            weights = []
            for plane in range(first, first + self.joined):
                if plane % self.run == 0:
                    channel = block * format.block + plane * format.plane_width
                    index = channel // (self.size or 1)
                    groups = self.load_groups(index) if self.whole is None else [self.whole]
                    decoders = [self.decoder(columns, group) for group in groups]
                place = plane % self.run // self.scaled_run
                weights.append(decoders[place](plane))
            channel = block * format.block + first * format.plane_width + part
            tile = self.load_x(channel, self.joined)
            if self.scale_sum and first % self.scaled_run == 0:
                total = self.no_sum  # the sum over a group is scaled before it is accumulated
            total += self.target.dot(join(weights), tile, trans_b=True)
            if self.scale_sum and (first + self.joined) % self.scaled_run == 0:
                scale = self.scale_of_sum(groups[place], index, x_scales)
                accumulator = total = self.target.multiply_add(as_float(total), scale, accumulator)
        return total

    def decoder(self, columns: list[jax.Array], group: code_kinds.Group) -> code_kinds.Decoder:
        """A function from a plane's index to its weights, scaled if `scaling` is `weight`."""
        if self.scale_weight:
            return self.kind.scaled_decoder(columns, group, self.shared, self.dtype)
        return self.kind.decoder(columns, group.arguments, self.shared, self.dtype)

    def scale_of_sum(
        self, group: code_kinds.Group, index: jax.Array, x_scales: jax.Array | None
    ) -> jax.Array:
        """The factor [tile_n, 1 or tile_m] of the sum over a group."""
        assert group.scale is not None
        if self.x_by_group:
            x_scales = self.load_x_scales(index) if x_scales is None else x_scales
            return group.scale * x_scales[None, :]
        return group.scale

    def scaled(self, accumulator: jax.Array) -> jax.Array:
        """The sums times the scales that the steps have not applied."""
        if self.exponent:
            accumulator *= 2.0**-self.exponent
        if self.whole is not None:
            assert self.whole.scale is not None
            accumulator *= self.whole.scale
        if self.operands.channel_scales is not None:
            scales = load_masked(self.operands.channel_scales.at[self.output], self.output_mask)
            accumulator *= scales[:, None]
        if self.operands.x_scales is not None and not self.x_by_group:
            accumulator *= self.load_x_scales(jnp.int32(0))[None, :]
        return accumulator
