"""The configuration of paged attention's kernel, and checks whether a problem can use it."""

from __future__ import annotations

import dataclasses

from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.registers import MOST_REGISTERS, WARP

MINIMUM_ROWS = 8  # the narrow side of the tensor-core instruction
NARROW_ROWS = 16  # the most rows of a narrow tile, which has more keys than rows
MOST_ROWS = 128
LEAST_KEYS, MOST_KEYS = 16, 128  # in a tile
MOST_WARPS = 8
ACCUMULATOR_REGISTERS = 128  # the most registers of a thread that hold float32 sums of values
# Bytes of shared memory that are not available for tiles of keys and values: OTHER_BYTES for
# queries and outputs, and for heads of more than 128 channels WEIGHT_BYTES per row, since their
# softmax weights change layout through shared memory.
OTHER_BYTES = 32768
WEIGHT_BYTES = 192


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The tiles of a program, the number of programs for a sequence, and compiler settings.

    tile_rows: rows of a program: (token, query head) pairs that share a KV head.
    tile_keys: keys of a tile, which is a piece of a page or several pages.
    splits: programs that share the packed keys of one sequence.
    warps: warps of a program.
    stages: pipeline stages; stages − 1 tiles are loaded ahead.
    residual_keys: keys of a tile of the 16-bit residual.
    residual_splits: programs that share one sequence's residual; 0 if the programs of the packed
        keys process the residual afterwards.
    registers: the most registers of a thread; None leaves the number to the assembler.
    is_balanced: whether programs of short sequences help with long ones (`balance`).
    has_one_loop: whether helping programs process all their tiles in one loop, instead of other
        sequences' tiles in a second loop.
    """

    tile_rows: int
    tile_keys: int
    splits: int
    warps: int
    stages: int
    residual_keys: int = LEAST_KEYS
    residual_splits: int = 0
    registers: int | None = None
    is_balanced: bool = False
    has_one_loop: bool = False

    @property
    def programs(self) -> int:
        """The number of programs of one sequence, for packed keys and for the residual."""
        return self.splits + self.residual_splits

    def __str__(self) -> str:
        residual = f" + {self.residual_splits}" if self.residual_splits else ""
        registers = "" if self.registers is None else f", {self.registers} registers"
        balanced = ", balanced" if self.is_balanced else ""
        splits = f"{self.splits}{residual} splits"
        return (
            f"{self.tile_rows}x{self.tile_keys}, {splits}, {self.warps} warps, {self.stages} stages"
            f"{registers}{balanced}"
        )


def tile_memory(problem: Problem, tile_rows: int) -> int:
    """The shared memory, in bytes, that is available for one program's tiles of keys and values."""
    weights = WEIGHT_BYTES * tile_rows if problem.cache.head_dim > 128 else 0
    return problem.limits.shared_memory - OTHER_BYTES - weights


def why_unsound(config: AttentionConfig, problem: Problem) -> str | None:
    """The reason why a problem can't run with a configuration, or None if it can."""
    checks = (_why_not_tiles, _why_not_splits, _why_not_residual, _why_no_room)
    return next((reason for check in checks if (reason := check(config, problem))), None)


def why_not_config(config: AttentionConfig) -> str | None:
    """The reason why no problem can run with a configuration, or None if some can."""
    for name, least, most in (
        ("tile_rows", MINIMUM_ROWS, MOST_ROWS),
        ("tile_keys", LEAST_KEYS, MOST_KEYS),
        ("residual_keys", LEAST_KEYS, MOST_KEYS),
        ("warps", 1, MOST_WARPS),
    ):
        value = getattr(config, name)
        if value & (value - 1) or not least <= value <= most:
            return f"{name} is {value}, expected a power of two from {least} to {most}"
    if config.registers is not None and not 24 <= config.registers <= MOST_REGISTERS:
        return f"registers is {config.registers}, expected 24 to {MOST_REGISTERS}"
    if config.has_one_loop and not config.is_balanced:
        return "has_one_loop is true, which only programs that are balanced can have"
    return None


def _why_not_tiles(config: AttentionConfig, problem: Problem) -> str | None:
    if reason := why_not_config(config):
        return reason
    if config.tile_rows > max(MINIMUM_ROWS, 2 * problem.rows):
        return f"tiles of {config.tile_rows} rows for {problem.rows}"
    group = problem.cache.format.group
    if group is not None and group % config.tile_keys:
        return f"tiles of {config.tile_keys} keys, where {group} share their channels' scales"
    return None


def _why_not_splits(config: AttentionConfig, problem: Problem) -> str | None:
    tiles = -(-problem.tokens // config.tile_keys)
    if config.splits > tiles:
        return f"{config.splits} programs for {tiles} tiles of keys"
    if config.is_balanced and problem.is_varlen:
        return "programs can't help each other where queries are not padded"
    return None


def _why_not_residual(config: AttentionConfig, problem: Problem) -> str | None:
    if not problem.residual:
        return "there is no residual to read" if config.residual_splits else None
    tiles = problem.residual // config.residual_keys
    if config.residual_splits > tiles:
        return f"{config.residual_splits} programs for {tiles} tiles of the residual"
    if config.residual_splits == 0 and config.splits > 1:
        return "programs that share packed keys leave the residual to others"
    return None


def _why_no_room(config: AttentionConfig, problem: Problem) -> str | None:
    sums = config.tile_rows * problem.cache.head_dim // (WARP * config.warps)
    if sums > ACCUMULATOR_REGISTERS:
        return f"{sums} registers for sums; there is room for {ACCUMULATOR_REGISTERS}"
    needed = (config.stages - 1) * config.tile_keys * problem.token_bytes
    if problem.residual:
        tile_bytes = 2 * 2 * problem.cache.head_dim * config.residual_keys  # keys and values
        needed = max(needed, (config.stages - 1) * tile_bytes)
    if needed > (room := tile_memory(problem, config.tile_rows)):
        return f"{needed} bytes of shared memory for tiles; there are {room}"
    return None
