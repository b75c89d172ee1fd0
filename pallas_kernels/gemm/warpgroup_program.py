"""What a program of the warpgroups' kernel is given, has in shared memory, and has to multiply."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.config import WarpgroupConfig
from mpjax.kernels.gemm.stages import Stages
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, decoding, memory
from mpjax.kernels.target import Target, current_target


class Call(NamedTuple):
    """What is static in a product.

    axis: of the cluster whose programs add their splits, or None where there is none.
    band_tiles: of rows, whose programs come before those of the next band; None in a single band.
    """

    format: WeightFormat
    scale_dtype: str
    config: WarpgroupConfig
    splits: int
    stages: Stages
    operand: jnp.dtype
    sum_dtype: jnp.dtype
    axis: str | None
    band_tiles: int | None
    interpret: bool

    @property
    def kind(self) -> code_kinds.CodeKind:
        """That of the codes."""
        return code_kinds.of(self.format)

    @property
    def columns(self) -> int:
        """Of 64 outputs, in a program's tile."""
        return self.config.warpgroups // self.config.shares

    @property
    def has_groups(self) -> bool:
        """Whether groups of channels have parameters of their own, which come with the words."""
        return self.format.group_size is not None

    @property
    def scales_groups(self) -> bool:
        """Whether these are scales, of sums or of decoded weights."""
        return self.kind.has_group_scales and self.has_groups

    @property
    def operand_width(self) -> int:
        """Channels of an operand: a plane's; of few rows, of as many as fill rows of x's tiles.

        Copies take as long for a row of 64 bytes as for one of 128, and few rows wait for them.
        Only planes of one group are multiplied at a time where its sum is scaled.
        """
        format, width = self.format, memory.SWIZZLED_BYTES // self.operand.itemsize
        if not self.config.has_few_rows:
            return format.plane_width
        if self.scales_groups:
            assert format.group_size is not None
            width = min(width, format.group_size)
        return max(format.plane_width, width)


class Arguments(NamedTuple):
    """References to global memory."""

    x: Any  # [M, K padded]
    words: Any  # [K blocks, N, columns · plane width], or a plain matrix [1, N, K padded]
    parameters: Any  # [words of parameters, N]
    table: Any  # [2**bits], or None
    channel_scales: Any  # [N], or None
    x_scales: Any  # [M], or None
    out: Any  # [splits, M, N]


class Shared(NamedTuple):
    """References to shared memory: tiles, and the barriers that say what they hold."""

    x_tiles: Any  # [slots, tile_m, channels of a block, or of a plane]
    word_tiles: Any  # [slots, tile_n, columns · plane width]
    out_tiles: Any  # [columns of 64 outputs, rows, 64]
    full: Any  # for each slot of words, and of x that comes with them
    free: Any
    parameter_tiles: Any = None  # [slots, words of a block, tile_n], where there are groups
    x_full: Any = None  # for each slot of x, where a tile of it is less than a block
    x_free: Any = None
    shared_sums: Any = None  # [senders, columns, 64, tile_m], where warpgroups share outputs
    shared_full: Any = None  # for each column
    crossed_sums: Any = None  # [columns, 64, rows that a program finishes], in a cluster
    crossed_full: Any = None  # one for all columns: see `memory.send`
    pair_rows: Any = None  # where codes index a table
    filled: Any = None
    interpreted_sums: Any = None  # [warpgroups, 64, tile_m], where the kernel is interpreted


def shared_memory(call: Call, words: jnp.dtype, out: jnp.dtype) -> dict[str, Any]:
    """The fields of `Shared` that a product needs, as `mosaic.launch.launch` takes them.

    words, out: the dtypes of words and output.
    """
    format, config, staged = call.format, call.config, call.stages
    columns, shares = call.columns, config.shares
    slots, x_slots = staged.blocks * shares, staged.x * shares
    copies = 1 + call.has_groups + (staged.parts == 1)  # of words, their parameters, and x
    arrays: dict[str, Any] = {
        "x_tiles": memory.shared(
            (x_slots, config.tile_m, format.block // staged.parts),
            call.operand,
            columns=call.operand_width,
        ),
        "word_tiles": memory.shared(
            (slots, config.tile_n, format.columns * format.plane_width),
            words,
            columns=format.plane_width,
        ),
        "out_tiles": memory.shared((columns, staged.out_rows, WARPGROUP_OUTPUTS), out),
        "full": memory.Barrier(num_arrivals=copies, num_barriers=slots),
        "free": memory.Barrier(num_arrivals=columns, num_barriers=slots),
    }
    if call.has_groups:
        shape = slots, format.parameters_of_block, config.tile_n
        arrays["parameter_tiles"] = memory.shared_rows(shape, jnp.uint32)
    if staged.parts > 1:
        arrays["x_full"] = memory.Barrier(num_barriers=x_slots)
        arrays["x_free"] = memory.Barrier(num_arrivals=columns, num_barriers=x_slots)
    if senders := shares - 1:
        sums = (senders, columns, WARPGROUP_OUTPUTS, config.tile_m)
        arrays["shared_sums"] = memory.shared(sums, call.sum_dtype)
        arrays["shared_full"] = memory.Barrier(num_arrivals=senders, num_barriers=columns)
    if call.axis is not None:
        finished = (columns, WARPGROUP_OUTPUTS, config.finished_rows)
        arrays["crossed_sums"] = memory.shared(finished, call.sum_dtype)
        arrays["crossed_full"] = memory.Barrier(num_arrivals=columns)
    if call.kind.has_table and not call.interpret:
        arrays["pair_rows"] = decoding.shared_rows_of_pairs(format.bits)
        arrays["filled"] = memory.Barrier(num_arrivals=config.warpgroups)
    if call.interpret:
        shape = config.warpgroups, WARPGROUP_OUTPUTS, config.tile_m
        arrays["interpreted_sums"] = memory.shared_rows(shape, call.sum_dtype)
    return arrays


@dataclasses.dataclass(frozen=True)
class Program:
    """One of them: a tile of outputs, and the blocks of K from `first` to `last`."""

    call: Call
    arguments: Arguments
    shared: Shared
    warpgroup: jax.Array  # that runs this
    split: jax.Array
    first_row: jax.Array
    first_output: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def here(cls, call: Call, arguments: Arguments, shared: Shared) -> Program:
        """The program that runs this, by its place in the grid."""
        warpgroup, split = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("split")
        tile = jax.lax.axis_index("row")
        if call.band_tiles is not None:
            tile += jax.lax.axis_index("band") * call.band_tiles
        first_row = tile * call.config.tile_m
        first_output = jax.lax.axis_index("column") * call.config.tile_n
        blocks = arguments.x.shape[1] // call.format.block
        first, last = split * blocks // call.splits, (split + 1) * blocks // call.splits
        return cls(call, arguments, shared, warpgroup, split, first_row, first_output, first, last)

    @property
    def target(self) -> Target:
        """What decoders are traced for: where codes index a table, one that knows its memory."""
        shared, config = self.shared, self.call.config
        if shared.pair_rows is None:
            return current_target()
        pairs = decoding.Pairs(shared.pair_rows, shared.filled, config.warpgroups)
        # The sums of many rows are in all registers.
        return decoding.Warpgroups(pairs, has_spare_registers=config.has_few_rows)

    def slot(self, share: Any, number: jax.Array, count: int) -> jax.Array:
        """Where a share has its block, or tile of x, of a number, of `count` that there are."""
        place = jax.lax.rem(number, count)
        return place if self.call.config.shares == 1 else share * count + place
