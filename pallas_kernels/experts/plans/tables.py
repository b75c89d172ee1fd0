"""Tables of measured plans of grouped products: their keys, and the checks of their entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels.experts.plans.configuration import (
    TILINGS,
    WARPGROUP_TILINGS,
    ExpertsConfig,
    ExpertsWarpgroupConfig,
)
from mpjax.kernels.experts.plans.problem import Problem
from mpjax.kernels.experts.plans.warpgroup_rule import why_not_warpgroups
from mpjax.kernels.experts.plans.warpgroup_rule import why_unsound as why_not_by_warpgroups
from mpjax.kernels.gemm.plans import SCALINGS, why_unsound
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.plans.tables import Tables
from mpjax.kernels.product_format import ProductFormat

_SHAPE = re.compile(r"([1-9]\d*)/([1-9]\d*) of ([1-9]\d*)x([1-9]\d*)( gated)?")


class Key(NamedTuple):
    """The key of a plan: the fields of its Problem, with the tokens' bucket."""

    format: str
    per_token: int
    experts: int
    channels: int
    outputs: int
    gated: bool
    tokens: int


def bucket(tokens: int) -> int:
    """The bucket of a number of tokens: the next power of two."""
    return 1 << max(0, tokens - 1).bit_length()


class ExpertTables(Tables[Problem]):
    """The measured plans of grouped products.

    A plan is found by format, by shape, such as `8/128 of 2048x1536 gated` (experts of a token, of
    all, K and N of each), and by the bucket of tokens.
    """

    operation = "experts"
    levels = 3
    configs: Mapping[str, type | None] = {
        "triton": ExpertsConfig,
        "mosaic": ExpertsWarpgroupConfig,
    }

    def key_of(self, problem: Problem) -> Key:
        """The key of a problem: its tokens count as those of their bucket."""
        return Key(
            str(problem.format),
            problem.per_token,
            problem.experts,
            problem.channels,
            problem.outputs,
            problem.gated,
            bucket(problem.tokens),
        )

    def names(self, key: Key) -> tuple[str, ...]:
        """The names of a key, such as `uint4:g128`, `8/128 of 2048x1536 gated` and `16`."""
        gated = " gated" if key.gated else ""
        shape = f"{key.per_token}/{key.experts} of {key.channels}x{key.outputs}{gated}"
        return key.format, shape, str(key.tokens)

    def key(self, names: tuple[str, ...]) -> Key:
        """The inverse of `names`; raises ValueError for names that a table can't have."""
        text, shape, tokens = names
        if str(ProductFormat.of(text)) != text:
            raise ValueError(f"{text}: the format is written {ProductFormat.of(text)} in a table")
        match = _SHAPE.fullmatch(shape)
        if match is None:
            raise ValueError(f"{text}: {shape!r} is no shape such as 8/128 of 2048x1536 gated")
        if not tokens.isdecimal() or bucket(int(tokens)) != int(tokens):
            raise ValueError(f"{' '.join(names)}: tokens must be a power of two")
        per_token, experts, channels, outputs = (int(match[i]) for i in range(1, 5))
        return Key(text, per_token, experts, channels, outputs, bool(match[5]), int(tokens))

    def check(self, key: Key, implementation: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError for fields that no configuration can have."""
        powers = ("tile_m", "tile_n", "warps", "width") if implementation == "triton" else ()
        tilings = TILINGS if implementation == "triton" else WARPGROUP_TILINGS
        choices: dict[str, tuple[str, ...]] = {"scaling": SCALINGS, "tiling": tilings}
        for name, value in config.items():
            if name in choices:
                if value not in choices[name]:
                    raise ValueError(f"{name} is {value!r}, expected one of {choices[name]}")
            elif type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a positive integer")
            elif name in powers and value & (value - 1):
                raise ValueError(f"{name} is {value}, expected a power of two")

    def suits(self, problem: Problem, plan: Plan) -> bool:
        """Whether a problem can run with a plan of its key on its GPU."""
        if plan.implementation == "mosaic":
            config: Any = plan.config
            reason = why_not_warpgroups(problem) or why_not_by_warpgroups(config, problem)
            return reason is None
        if not problem.format.weight.is_packed:
            return True
        return why_unsound(plan.config, problem.product(plan.config.tile_m)) is None


TABLES = ExpertTables()
