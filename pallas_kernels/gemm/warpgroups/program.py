"""A program of the warpgroup kernel: its static facts, arguments, shared memory and tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import Stages
from mpjax.kernels.mosaic import WARPGROUP_OUTPUTS, decoding, memory
from mpjax.kernels.mosaic.launch import can_give_registers
from mpjax.kernels.product_format import ProductFormat
from mpjax.kernels.target import Target, current_target


class Call(NamedTuple):
    """The static facts of a product, the same for all programs.

    stages: the slots in shared memory.
    operand: the dtype of x, and of decoded weights.
    axis: the name of the cluster's axis, or None if programs are not in clusters.
    band_tiles: the number of tiles of rows in a band; all programs of a band come before those of
        the next band. None if there is a single band.
    blocks: of K in each matrix of a stack of experts, one of which a tile of rows uses; None for a
        single matrix.
    gate: combines the sums of two output channels, one in each half of a matrix; or None.
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
    blocks: int | None = None
    gate: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    @property
    def kind(self) -> code_kinds.CodeKind:
        """The kind of the weight's codes; not for plain weights."""
        return code_kinds.of(self.format)

    @property
    def has_producer(self) -> bool:
        """Whether a separate warpgroup begins the copies, and gives its registers to consumers.

        If it can't give registers (JAX 0.12), many rows' sums fit only without a producer: then the
        first consumer begins the copies.
        """
        return self.config.has_few_rows or self.scales_x_blocks or can_give_registers()

    @property
    def warpgroups(self) -> int:
        """The number of a program's warpgroups: consumers, and a producer if there is one."""
        return self.config.warpgroups + self.has_producer

    @property
    def is_plain(self) -> bool:
        """Whether weights are 16-bit matrices [K, N], whose tiles tensor cores read transposed."""
        return not self.format.is_packed

    @property
    def columns(self) -> int:
        """The number of columns of a program's tile, of 64 output channels each."""
        return self.config.warpgroups // self.config.shares

    @property
    def halves(self) -> int:
        """The number of ranges of output channels in a tile: two with a gate, else one."""
        return 1 if self.gate is None else 2

    @property
    def has_groups(self) -> bool:
        """Whether groups of input channels have parameters, which are copied with the words."""
        return self.format.group_size is not None

    @property
    def scales_groups(self) -> bool:
        """Whether the parameters of groups are scales, which multiply sums or decoded weights."""
        return self.has_groups and self.kind.has_group_scales

    @property
    def scales_x_blocks(self) -> bool:
        """Whether x has a scale for each row and block of K, as for `int4`."""
        return ProductFormat.of(self.format).activations.group_size is not None

    @property
    def operand_width(self) -> int:
        """The number of input channels of an operand.

        With many rows these are the channels of a plane. With few rows they are the channels of as
        many planes as fill the 128 bytes of a row of x's tile: a copy takes as long for rows of 64
        bytes as for 128, and few rows wait for copies. If the sum over a group is scaled, an
        operand does not extend beyond a group.
        """
        format, width = self.format, memory.SWIZZLED_BYTES // self.operand.itemsize
        if not self.config.has_few_rows:
            return format.plane_width
        if self.scales_groups:
            assert format.group_size is not None
            width = min(width, format.group_size)
        return max(format.plane_width, width)


class Arguments(NamedTuple):
    """References to global memory; outside of a kernel, arrays.

    In a stack of E experts, the experts' blocks (or plain matrices) and parameters are
    concatenated, and `table`, `channel_scales` and `bias` have a leading axis E. `Program` has
    references to the parts of its expert.
    """

    x: Any  # [M, K padded to whole blocks, or, as copies past its end are zeros, to whole planes]
    words: Any  # [K blocks, N, columns · plane width], flat [1, N, K padded], or plain [1, K, N]
    parameters: Any = None  # [groups of parameters, N]; plain weights have none
    table: Any = None  # [2**bits]
    channel_scales: Any = None  # [N]
    x_scales: Any = None  # [M]
    x_block_scales: Any = None  # [K blocks, M]
    bias: Any = None  # float32 [N]
    row_weights: Any = None  # float32 [M]: a factor of each row of the output
    experts: Any = None  # int32 [tiles of rows]: each tile's expert; −1 for an unused tile
    out: Any = None  # [splits, M, N], or with a gate [1, M, N / 2]


class Shared(NamedTuple):
    """References to shared memory: tiles, and barriers for when they are full and free.

    The fields' names decide their order in memory.
    """

    x_tiles: Any  # [slots, tile_m, input channels of a block or of a plane]
    # [slots · halves, tile_n / halves, words of a block], or for plain weights [slots · halves, K
    # of a block, tile_n / halves]
    word_tiles: Any
    out_tiles: Any  # [columns of 64 outputs, tiles · rows, 64]
    full: Any  # barriers [slots]: words, their parameters, and x of whole blocks have arrived
    free: Any  # barriers [slots]: all consumers have loaded the words
    # [slots · halves, parameters of a block, tile_n / halves], if groups have any
    parameter_tiles: Any = None
    x_scale_tiles: Any = None  # [slots, 1, tile_m], if x has a scale for each row and block
    turns: Any = None  # barriers [columns]: the consumer's turn to begin the products of a block
    x_full: Any = None  # barriers [slots of x], if x is copied plane by plane
    x_free: Any = None  # barriers [slots of x], if x is copied plane by plane
    shared_sums: Any = None  # [senders, columns, 64, tile_m], if consumers share outputs
    shared_full: Any = None  # barriers [columns]: all senders' sums have arrived
    crossed_sums: Any = None  # [columns, 64, rows that a program finishes], in a cluster
    crossed_full: Any = None  # a single barrier for all columns: see `memory.send`
    pair_rows: Any = None  # rows with the pairs of a table's values, if codes index a table
    filled: Any = None  # a barrier: the rows are filled
    up_sums: Any = None  # [columns / 2, products, 64, rows of a product], with a gate
    up_full: Any = None  # barriers [columns / 2]: the sums of the other half have arrived
    interpreted_sums: Any = None  # [warpgroups, 64, tile_m], if the kernel is interpreted


def shared_memory(call: Call, words: jnp.dtype, out: jnp.dtype) -> dict[str, Any]:
    """The scratch types of the fields of `Shared` that a product needs, for `mosaic.launch.launch`.

    words, out: the dtypes of the words and of the output tiles.
    """
    format, config, staged = call.format, call.config, call.stages
    columns, shares = call.columns, config.shares
    slots, x_slots = staged.blocks * shares, staged.x * shares
    # Copies of words, parameters, x and its scales.
    halves = call.halves
    copies = halves * (1 + call.has_groups) + (staged.parts == 1) + call.scales_x_blocks
    word_tile = config.tile_n // halves, format.columns * format.plane_width
    arrays: dict[str, Any] = {
        "x_tiles": memory.shared(
            (x_slots, config.tile_m, format.block // staged.parts),
            call.operand,
            columns=call.operand_width,
        ),
        "word_tiles": memory.shared(
            (slots * halves, *(word_tile[::-1] if call.is_plain else word_tile)),
            words,
            columns=format.plane_width,
        ),
        "out_tiles": memory.shared(
            (columns // halves, staged.out_tiles * staged.out_rows, WARPGROUP_OUTPUTS), out
        ),
        "full": memory.Barrier(num_arrivals=copies, num_barriers=slots),
        "free": memory.Barrier(num_arrivals=columns, num_barriers=slots),
    }
    if call.has_groups:
        shape = slots * halves, format.parameters_of_block, config.tile_n // halves
        arrays["parameter_tiles"] = memory.shared_rows(shape, jnp.uint32)
    if call.scales_x_blocks:
        arrays["x_scale_tiles"] = memory.shared_rows((slots, 1, config.tile_m), jnp.float32)
        arrays["turns"] = memory.Barrier(num_barriers=columns)
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
    if call.gate is not None:
        products = config.product_rows
        of_products = columns // 2, len(products), WARPGROUP_OUTPUTS, products[0]
        arrays["up_sums"] = memory.shared(of_products, jnp.float32)
        arrays["up_full"] = memory.Barrier(num_arrivals=len(products), num_barriers=columns // 2)
    if code_kinds.has_table(format) and not call.interpret:
        arrays["pair_rows"] = decoding.shared_rows_of_pairs(format.bits)
        arrays["filled"] = memory.Barrier(num_arrivals=config.warpgroups)
    if call.interpret:
        shape = config.warpgroups, WARPGROUP_OUTPUTS, config.tile_m
        arrays["interpreted_sums"] = memory.shared_rows(shape, call.sum_dtype)
    return arrays


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: the tile at `first_row` and `first_output`, and blocks first … last − 1 of K.

    With a gate, half of the tile is at `first_output` in each half of the matrix.

    warpgroup: the index of the warpgroup that runs this code.
    expert: of the tile's rows in a stack of matrices, −1 for none; None for a single matrix.
    """

    call: Call
    arguments: Arguments
    shared: Shared
    warpgroup: jax.Array
    split: jax.Array
    first_row: jax.Array
    first_output: jax.Array
    first: jax.Array
    last: jax.Array
    expert: jax.Array | None = None

    @classmethod
    def here(cls, call: Call, arguments: Arguments, shared: Shared) -> Program:
        """The program that runs this code, by its index in the grid."""
        warpgroup, split = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("split")
        tile = jax.lax.axis_index("row")
        if call.band_tiles is not None:
            tile += jax.lax.axis_index("band") * call.band_tiles
        first_row = tile * call.config.tile_m
        first_output = jax.lax.axis_index("column") * (call.config.tile_n // call.halves)
        blocks = pl.cdiv(arguments.x.shape[1], call.format.block)
        first, last = split * blocks // call.splits, (split + 1) * blocks // call.splits
        expert = None
        if call.blocks is not None:
            # The last band may have tiles beyond the last one. They compute nothing (`is_used`);
            # the index is clamped so that the load is in bounds.
            expert = arguments.experts[jnp.minimum(tile, arguments.experts.shape[0] - 1)]
            arguments = _of_expert(arguments, jnp.maximum(expert, 0))
        indices = warpgroup, split, first_row, first_output, first, last
        return cls(call, arguments, shared, *indices, expert)

    @property
    def is_used(self) -> jax.Array | None:
        """Whether there is anything to compute; None if there always is.

        The last band may have fewer tiles of rows than others, and a grouped product has tiles
        without an expert.
        """
        inside = None
        if self.call.band_tiles is not None:
            inside = self.first_row < self.arguments.out.shape[1]
        if self.expert is None:
            return inside
        has_expert = self.expert >= 0
        return has_expert if inside is None else inside & has_expert

    @property
    def matrix(self) -> Any:
        """The index of the program's matrix in the weight."""
        return 0 if self.expert is None else self.expert

    def block_of_weight(self, block: jax.Array) -> jax.Array:
        """The index of a block of K among the blocks of all matrices."""
        if self.expert is None or self.call.blocks is None:
            return block
        return self.expert * self.call.blocks + block

    @property
    def outputs(self) -> int:
        """The number of output channels of a matrix."""
        count: int = self.arguments.words.shape[2 if self.call.is_plain else 1]
        return count

    def half_of(self, column: Any) -> Any:
        """The half of the tile with this column of 64 output channels; 0 without a gate."""
        return 0 if self.call.gate is None else column // (self.call.columns // 2)

    def outputs_of(self, half: Any) -> Any:
        """The first output channel of a half of the tile, as an index of the matrix."""
        if self.call.gate is None:
            return self.first_output
        return self.first_output + half * (self.outputs // 2)

    def place_of(self, slot: jax.Array, half: Any) -> jax.Array:
        """The index of the tile of words, or of parameters, of a half in a slot."""
        return slot if self.call.gate is None else slot * 2 + half

    @property
    def target(self) -> Target:
        """The `Target` whose operations the consumers use.

        If codes index a table, it has the shared memory for pairs of the table's values.
        """
        shared, config = self.shared, self.call.config
        if shared.pair_rows is None:
            return current_target()
        pairs = decoding.Pairs(shared.pair_rows, shared.filled, config.warpgroups)
        # With many rows, sums occupy all available registers.
        return decoding.Warpgroups(pairs, has_spare_registers=config.has_few_rows)

    def slot(self, share: Any, number: jax.Array, count: int) -> jax.Array:
        """The slot of block (or tile of x) `number` of a share; each share has `count` slots."""
        place = jax.lax.rem(number, count)
        return place if self.call.config.shares == 1 else share * count + place


def _of_expert(arguments: Arguments, expert: jax.Array) -> Arguments:
    """The arguments of one expert, except words and parameters, which stay concatenated."""
    names = "table", "channel_scales", "bias"
    stacks = {name: getattr(arguments, name) for name in names}
    own = {name: stack.at[expert] for name, stack in stacks.items() if stack is not None}
    return arguments._replace(**own)
