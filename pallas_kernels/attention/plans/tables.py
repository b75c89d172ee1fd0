"""The tables of measured plans of attention: their keys, and the checks of their entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.kernels.attention.plans.configuration import (
    AttentionConfig,
    why_not_config,
    why_unsound,
)
from mpjax.kernels.attention.plans.problem import CacheShape, Problem
from mpjax.kernels.attention.plans.team_rule import SMALL_KEYS
from mpjax.kernels.device import Limits
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.plans.tables import Tables

PAGE_SIZE = 128  # tokens of a page, in measurements of plans
_FLAGS = ("is_balanced", "has_one_loop")


class Key(NamedTuple):
    """The key of a plan: a KV format, heads, and buckets of the rows, the batch and the tokens."""

    format: str  # as str(KVFormat)
    kv_heads: int
    head_dim: int
    is_varlen: bool
    rows: int
    batch: int
    tokens: int

    def problem(self, limits: Limits) -> Problem:
        """The largest problem with this key, on a GPU with some limits, for pages of PAGE_SIZE."""
        cache = CacheShape(KVFormat.parse(self.format), self.kv_heads, self.head_dim, PAGE_SIZE)
        return Problem(self.batch, self.rows, self.tokens, cache, limits, self.is_varlen)


def bucket(number: int) -> int:
    """The smallest bucket that is not below a number.

    Buckets are numbers of three binary digits followed by zeros, such as 7, 8, 10 and 12. A plan
    measured for a bucket serves the numbers down to the next smaller bucket, a fifth less at most,
    so that its programs still fill the GPU.
    """
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit


class AttentionTables(Tables[Problem]):
    """The tables of measured plans of attention, in the JSON files of `pallas_kernels/tuned`.

    A plan is found by format, by heads such as `8x128` (KV heads × head dim), by rows, and by
    batch × tokens such as `16x4096`.
    """

    operation = "attention"
    levels = 4
    configs: Mapping[str, type | None] = {"triton": AttentionConfig}

    def key_of(self, problem: Problem) -> Key:
        """The key of a problem, with numbers as their buckets; page sizes make no difference."""
        cache = problem.cache
        heads = str(cache.format), cache.kv_heads, cache.head_dim
        sizes = (problem.rows, problem.batch, problem.tokens)
        return Key(*heads, problem.is_varlen, *map(bucket, sizes))

    def names(self, key: Key) -> tuple[str, ...]:
        """The names of a key in a table, such as `KV8`, `8x128`, `4` (or `varlen 4`), `16x4096`."""
        rows = f"varlen {key.rows}" if key.is_varlen else str(key.rows)
        return key.format, f"{key.kv_heads}x{key.head_dim}", rows, f"{key.batch}x{key.tokens}"

    def key(self, names: tuple[str, ...]) -> Key:
        """The inverse of `names`. Raises ValueError for names that `names` does not give."""
        text, heads, rows, sizes = names
        if str(KVFormat.parse(text)) != text:
            raise ValueError(f"{text}: the format is written {KVFormat.parse(text)} in a table")
        numbers = [
            _numbers(pattern, name, f"{' '.join(names)}: {name!r} is not {expected}")
            for pattern, name, expected in (
                (r"([1-9]\d*)x([1-9]\d*)", heads, "KV heads x head dim, such as 8x128"),
                (r"(?:varlen )?([1-9]\d*)", rows, "a number of rows, such as 4 or varlen 4"),
                (r"([1-9]\d*)x([1-9]\d*)", sizes, "batch x tokens, such as 16x4096"),
            )
        ]
        for number in (*numbers[1], *numbers[2]):
            if bucket(number) != number:
                raise ValueError(
                    f"{' '.join(names)}: {number} is no bucket, expected {bucket(number)}"
                )
        (kv_heads, head_dim), (row_bucket,), (batch, tokens) = numbers
        is_varlen = rows.startswith("varlen")
        return Key(text, kv_heads, head_dim, is_varlen, row_bucket, batch, tokens)

    def check(self, key: Key, implementation: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError for fields that no configuration can have."""
        for name, value in config.items():
            kind, least = (bool, False) if name in _FLAGS else (int, int(name != "residual_splits"))
            if type(value) is not kind or value < least:
                expected = "true or false" if kind is bool else f"an integer from {least} on"
                raise ValueError(f"{name} is {value!r}, expected {expected}")
        if reason := why_not_config(AttentionConfig(**config)):
            raise ValueError(reason)

    def suits(self, problem: Problem, plan: Plan) -> bool:
        """Whether a problem can run with a plan of its key, whose tiles may not suit its pages."""
        fits = plan.config.tile_keys <= max(problem.cache.page_size, SMALL_KEYS)
        return fits and why_unsound(plan.config, problem) is None


TABLES = AttentionTables()


def _numbers(pattern: str, name: str, reason: str) -> tuple[int, ...]:
    match = re.fullmatch(pattern, name)
    if match is None:
        raise ValueError(reason)
    return tuple(int(number) for number in match.groups())
