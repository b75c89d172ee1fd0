"""Which plan a product runs with: from a table of measured ones, else by a rule of thumb."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

from pallas_kernels import backend
from pallas_kernels import codes as code_kinds
from pallas_kernels.formats import WeightFormat
from pallas_kernels.gemm import tables
from pallas_kernels.gemm.config import GemmConfig, Plan
from pallas_kernels.quantized_tensor import QuantizedTensor

# Up to so many rows the fused kernel is the faster one, measured on the H200 at K4096 N24576. To
# write the weight out in 16 bits for cuBLAS takes 67 µs there, which is the price of decoding it
# again for every tile of rows; looking values up is dearer than computing them. XLA's FP8 product
# beats what Triton makes of FP8, which it multiplies in 16 bits; its int8 product never beats the
# fused one, as its sums cross memory.
FUSED_ROWS, FUSED_ROWS_OF_TABLES, FUSED_ROWS_OF_FLOAT8 = 256, 128, 32
# tile_m, tile_n and warps for more and more rows, measured on the H200.
TILES = ((8, 64, 4), (16, 64, 4), (32, 64, 4), (64, 64, 4), (128, 64, 4))
WIDE_TILE = (64, 128, 4)  # where a table in shared memory leaves registers for it
# For many rows: it reads each operand least often, and decodes a weight for the most rows, but
# wants tiles for most multiprocessors.
LARGEST_TILE = (128, 128, 8)
LARGEST_TILES = {"int8": (128, 128, 4), "liquid4": (256, 64, 4)}
# LARGEST_TILE has twice the outputs of a tile for fewer rows, and steps that take so much longer;
# where there are fewer steps, the time of the first loads and of the partial sums is what counts.
LONGER_STEPS, FEW_STEPS = 1.6, 12
# Programs that keep the memory pipeline of a multiprocessor full, by tile_m. Where one has more to
# multiply it needs less company, and the partial sums of a split are dearer.
PROGRAMS_PER_MULTIPROCESSOR = {8: 4, 16: 4, 32: 3, 64: 2, 128: 1, 256: 1}
# Where more share one than this, two warps do for each.
PROGRAMS_OF_FOUR_WARPS = 3
# In steps of LARGEST_TILE, of which a multiprocessor runs one at a time: what a program takes to
# begin, and what one tile's partial sum costs, which is written and read back.
BEGINNING, PARTIAL_SUM = 1, 0.03
# Where one multiprocessor has so much more to do than the mean, smaller programs are spread better.
UNEVEN = 1.2
# Each split adds a partial sum to write and read back, and pays for a pipeline of its own.
BLOCKS_PER_SPLIT = 4
MAXIMUM_SPLITS = 8
# Of a thread's 255 registers; the rest holds words, decoded weights and addresses.
ACCUMULATOR_REGISTERS = 128

_forced: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("forced plan", default=None)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a GPU allows."""

    multiprocessors: int
    compute_capability: float

    @property
    def shared_memory(self) -> int:
        """Bytes that one program can have."""
        return backend.shared_memory(self.compute_capability)


def current_limits() -> Limits:
    """Those of the first GPU; an H200's where there is none."""
    return Limits(backend.multiprocessors(), backend.compute_capability() or 9.0)


def plan(rows: int, weight: QuantizedTensor) -> Plan:
    """How to multiply x of `rows` rows by a weight: as measured, else by `heuristic`.

    Only looks at shapes, so that it can be called while tracing. Raises tables.TableError for a
    damaged table.
    """
    if (forced := _forced.get()) is not None:
        return forced
    place = tables.key(weight.format, *weight.shape, rows)
    entry = tables.lookup(tables.current_device(), place)
    if entry is not None:
        return entry.plan
    return heuristic(rows, weight.format, *weight.shape, current_limits())


def configure(rows: int, weight: QuantizedTensor) -> GemmConfig:
    """A configuration of the fused kernel, also where `plan` would choose something else.

    Raises UnsupportedError, with the reason, where the GPU can't multiply the format.
    """
    config = plan(rows, weight).config
    return config or tile(rows, weight.format, *weight.shape, current_limits())


@contextlib.contextmanager
def forced(plan: Plan) -> Iterator[None]:
    """Inside, in this thread, `plan` is the answer for every product that is traced."""
    token = _forced.set(plan)
    try:
        yield
    finally:
        _forced.reset(token)


def conditions() -> Hashable:
    """What plans depend on besides shapes: for the key of whoever keeps traces of products."""
    return _forced.get(), tables.reading()


def unfused(format: WeightFormat, limits: Limits) -> Literal["dequantize", "xla"]:
    """The implementation for many rows.

    XLA's own product takes operands of 8 bits whose scales are constant along K.
    """
    if format.is_flat and format.group_size is None and why_not_fused(format, limits) is None:
        return "xla"
    return "dequantize"


def why_not_fused(format: WeightFormat, limits: Limits) -> str | None:
    """Why the fused kernel can't multiply a format on a GPU; None if it can."""
    if (
        format.activations == "float8"
        and limits.compute_capability < backend.FLOAT8_COMPUTE_CAPABILITY
    ):
        return (
            f"FP8 products need compute capability {backend.FLOAT8_COMPUTE_CAPABILITY}, "
            f"and this GPU has {limits.compute_capability}"
        )
    return None


def heuristic(rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits) -> Plan:
    """A sound plan for any shape and format, without having measured it."""
    other = unfused(format, limits)
    if why_not_fused(format, limits) or rows > _most_fused_rows(format):
        return Plan(other)
    return Plan("triton", tile(rows, format, channels, outputs, limits))


def _most_fused_rows(format: WeightFormat) -> float:
    if format.activations == "int8":
        return math.inf
    if format.activations == "float8" and format.group_size is None:
        return FUSED_ROWS_OF_FLOAT8
    return FUSED_ROWS_OF_TABLES if code_kinds.of(format).has_table else FUSED_ROWS


def tile(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits
) -> GemmConfig:
    """A sound configuration of the fused kernel for any shape and format.

    Raises UnsupportedError, with the reason, where the GPU can't multiply the format at all.
    """
    has_table = code_kinds.of(format).has_table

    def divide(sizes: tuple[int, int, int]) -> _Division:
        return _divide(rows, format, channels, outputs, sizes, limits)

    size = next((size for size in range(4) if rows <= TILES[size][0]), 4)
    tiles = list(reversed(TILES[: size + 1]))
    if rows <= 16 and not has_table:
        splits = divide(tiles[0]).splits
        programs = splits * _tiles(rows, outputs, *tiles[0][:2])
        many = splits > 1 and programs > PROGRAMS_OF_FOUR_WARPS * limits.multiprocessors
        if many or _unevenness(programs, limits) > UNEVEN:
            tiles = [(tile_m, tile_n, warps // 2) for tile_m, tile_n, warps in tiles]
    # What is cheap to decode can be decoded more often, in smaller tiles that fill the GPU better.
    is_dear = format.bits <= 4 and format.activations is None
    largest = LARGEST_TILES.get(format.codes, LARGEST_TILE)
    fills = 3 * _tiles(rows, outputs, *largest[:2]) >= 2 * limits.multiprocessors
    if rows > (128 if is_dear else 256) and fills:
        tiles.insert(0, largest)
    elif rows > 64 and is_dear and not has_table:
        longer, shorter = divide(largest).steps, divide(tiles[0]).steps
        if FEW_STEPS <= longer <= shorter / LONGER_STEPS:
            tiles.insert(0, largest)
    depths: tuple[int, ...] = (3, 2)
    lanes = widths(format)
    if rows <= 32 and (format.activations or format.group_size is None):
        depths = (4, 3, 2)
    if has_table and (rows > 16 if format.bits == 4 else 8 < rows <= 32):
        depths = (2, 3)  # looking up waits: rather the company of other programs
    if 64 < rows <= 128 and format.bits == 8 and format.activations is None:
        # With less read ahead, two programs find room on a multiprocessor, where there are so many.
        beside = _tiles(rows, outputs, *tiles[0][:2]) >= 2 * limits.multiprocessors
        depths = (2, 3) if beside else depths
    if code_kinds.of(format).shared_bytes and rows > 32:
        lanes = lanes[::-1]
        tiles = [WIDE_TILE, *tiles] if 64 < rows <= 128 else tiles
    # Where shared memory does not hold it all, less of a large tile is still better than a smaller
    # one.
    for sizes, stages, width in itertools.product(tiles, depths, lanes):
        (tile_m, tile_n, warps), division = sizes, divide(sizes)
        # The scale costs an operation for each output and group in the accumulator, and one for
        # every two weights otherwise. With four warps, which means `wgmma`, the compiler also loads
        # it ahead only if it is part of an operand. Symmetric weights in bfloat16 take it for free.
        on_weight = can_scale_weights(format) and (tile_m >= 64 or has_table or format.symmetric)
        scaling: tables.Scaling = "weight" if on_weight else "accumulator"
        splits, unsplit, _ = division
        config = GemmConfig(tile_m, tile_n, splits, warps, stages, scaling, width, unsplit)
        if (reason := why_unsound(config, format, limits)) is None:
            return config
    raise backend.UnsupportedError(f"the fused kernel can't multiply {format}: {reason}")


class _Division(NamedTuple):
    """How many programs share a tile past the `unsplit` channels, and what `_steps` says of it."""

    splits: int
    unsplit: int | None
    steps: float


def _divide(
    rows: int,
    format: WeightFormat,
    channels: int,
    outputs: int,
    tile: tuple[int, int, int],
    limits: Limits,
) -> _Division:
    """Programs that share a tile: all run at once, and the longest and busiest are waited for."""
    tile_m, tile_n, _ = tile
    blocks, tiles = -(-channels // format.block), _tiles(rows, outputs, tile_m, tile_n)
    sizes = range(1, _most_splits(format, channels) + 1)

    if tile == LARGEST_TILE:  # which a multiprocessor runs one of at a time
        divisions = [_Division(size, None, _steps(size, tiles, blocks, limits)) for size in sizes]
        tiles_m = -(-rows // tile_m)
        tiles_n = tiles // limits.multiprocessors * limits.multiprocessors // tiles_m
        if tiles_n:  # of whole rounds first, and then what is left over
            whole = _steps(1, tiles_m * tiles_n, blocks, limits) + BEGINNING
            for size in sizes[1:]:
                steps = whole + _steps(size, tiles - tiles_m * tiles_n, blocks, limits)
                divisions.append(_Division(size, tiles_n * tile_n, steps))
        return min(divisions, key=lambda division: division.steps)
    wanted = limits.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile_m] / tiles

    def loss(splits: int) -> float:
        longest = -(-blocks // splits) * splits / blocks  # times the mean
        waits = math.log(longest * _unevenness(tiles * splits, limits))
        return abs(math.log(splits / wanted)) + 2 * waits

    splits = min((size for size in sizes if size == 1 or size <= wanted), key=loss)
    return _Division(splits, None, _steps(splits, tiles, blocks, limits))


def _steps(splits: int, tiles: int, blocks: int, limits: Limits) -> float:
    """Steps of K that the busiest multiprocessor works off, one program after another.

    What programs take to begin, and partial sums to be added, is counted in steps, too.
    """
    rounds = -(-splits * tiles // limits.multiprocessors)
    sums = PARTIAL_SUM * tiles * splits if splits > 1 else 0
    return rounds * (-(-blocks // splits) + BEGINNING) + sums


def _unevenness(programs: int, limits: Limits) -> float:
    """How many of equal programs the busiest multiprocessor runs, times the mean."""
    return -(-programs // limits.multiprocessors) * limits.multiprocessors / programs


def _tiles(rows: int, outputs: int, tile_m: int, tile_n: int) -> int:
    return -(-rows // tile_m) * -(-outputs // tile_n)


def _most_splits(format: WeightFormat, channels: int) -> int:
    blocks = -(-channels // format.block)
    return max(1, min(blocks // BLOCKS_PER_SPLIT, MAXIMUM_SPLITS))


def widths(format: WeightFormat) -> tuple[int | None, ...]:
    """Lanes of a plane that a step may take: all, or half of them if rows stay 64 bytes long."""
    half = format.plane_width // 2
    return (None, half) if half * format.word_bits >= 64 * 8 else (None,)


def can_scale_weights(format: WeightFormat) -> bool:
    """Whether `scaling="weight"` is a choice: only 16-bit operands can hold a group's scale."""
    return format.group_size is not None and format.activations is None


def why_unsound(config: GemmConfig, format: WeightFormat, limits: Limits) -> str | None:
    """Why a configuration can't run well, or at all, on a GPU; None if it can."""
    if reason := why_not_fused(format, limits):
        return reason
    if config.scaling == "weight" and not can_scale_weights(format):
        return f"{format} has no scales that can be applied to its weights"
    if config.unsplit is not None and config.unsplit % config.tile_n:
        return f"{config.unsplit} channels that are not split are no whole tiles of {config.tile_n}"
    if config.tile_n < 16 * config.warps:
        return f"{config.tile_n} output channels are too few for {config.warps} warps: 16 each"
    if (needed := shared_memory(config, format, limits)) > limits.shared_memory:
        return f"{needed} bytes of shared memory; there are {limits.shared_memory}"
    if (needed := accumulator_registers(config, format)) > ACCUMULATOR_REGISTERS:
        return f"{needed} registers for sums; there is room for {ACCUMULATOR_REGISTERS}"
    return None


def shared_memory(config: GemmConfig, format: WeightFormat, limits: Limits) -> int:
    """Bytes of shared memory that a program of the fused kernel has, or a few more.

    A load that is `stages` − 1 steps ahead of its use has so many buffers, and one more where
    `wgmma` (compute capability 9.0, four warps or more) still reads the last: it takes x from
    shared memory, and also the weight where words are codes and nothing is decoded.
    """
    channels = format.planes * (config.width or format.plane_width)  # of a step
    words = config.tile_n * channels * format.bits // 8
    x = config.tile_m * channels * format.word_bits // 8
    groups = 0 if format.group_size is None else max(1, format.block // format.group_size)
    parameters = 4 * groups * (config.tile_n + (config.tile_m if format.activations else 0))
    reads_shared = limits.compute_capability >= 9 and config.warps >= 4 and config.tile_n >= 64
    loop = (config.stages - 1) * (words + x + parameters)
    if reads_shared:
        loop += x + (words if format.is_flat else 0)
    transposed = config.tile_m * config.tile_n * 4  # on the way out, when the loop's are free
    return max(loop, transposed) + code_kinds.of(format).shared_bytes


def accumulator_registers(config: GemmConfig, format: WeightFormat) -> int:
    """Registers of a thread that hold sums: those of a group apart, where they are scaled later."""
    # The groups of liquid4 become int8, so that one sum runs over all of K.
    apart = format.group_size is not None and code_kinds.of(format).has_group_scales
    sums = 2 if apart and config.scaling == "accumulator" else 1
    return sums * config.tile_m * config.tile_n // (32 * config.warps)


def candidates(
    rows: int, format: WeightFormat, channels: int, outputs: int, limits: Limits, most: int = 40
) -> list[Plan]:
    """The plans worth measuring, the rule of thumb's own first: those nearest to it, all sound.

    rows: a bucket. Nearness counts doublings of a tile's sides, of the outputs of a warp, the
    width and the warps in flight, and stages.
    """
    other = Plan(unfused(format, limits))
    if why_not_fused(format, limits):
        return [other]
    center = tile(rows, format, channels, outputs, limits)

    def place(config: GemmConfig) -> tuple[float, ...]:
        programs = _tiles(rows, outputs, config.tile_m, config.tile_n) * config.splits
        per_warp = config.tile_n / config.warps
        width = config.width or format.plane_width
        logarithms = map(math.log2, (config.tile_m, config.tile_n, per_warp, width))
        return *logarithms, math.log2(programs * config.warps), config.stages

    def distance(config: GemmConfig) -> float:
        moved = sum(abs(a - b) for a, b in zip(place(config), place(center), strict=True))
        return moved + (config.scaling != center.scaling)

    height = max(8, min(256, 2 ** math.ceil(math.log2(rows))))
    space = itertools.product(
        [size for size in (height, height // 2, height // 4) if size >= 8],
        (32, 64, 128, 256),
        [splits for splits in (1, 2, 3, 4, 6, 8) if splits <= _most_splits(format, channels)],
        (1, 2, 4, 8),
        (2, 3, 4, 5),
        tables.SCALINGS,
        widths(format),
    )
    configs = {center} | {GemmConfig(*fields) for fields in space}
    if center.unsplit is not None:
        alike = [c for c in configs if (c.tile_m, c.tile_n) == (center.tile_m, center.tile_n)]
        configs |= {dataclasses.replace(c, unsplit=center.unsplit) for c in alike if c.splits > 1}
    sound = [config for config in configs if why_unsound(config, format, limits) is None]
    sound.sort(key=lambda config: (distance(config), str(config)))
    plans = [Plan("triton", config) for config in sound]
    # What many rows run with has no tiles, and is a bound that no product may miss.
    return [*plans[: most - 1], other]
