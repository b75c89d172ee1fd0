"""Paged attention as a planned operation: its keys in tables, and its rule."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from mpjax.kernels import plans
from mpjax.kernels.attention.plans.candidates import candidates
from mpjax.kernels.attention.plans.configuration import (
    AttentionConfig,
    why_not_config,
    why_unsound,
)
from mpjax.kernels.attention.plans.invariant_rule import invariant_plan
from mpjax.kernels.attention.plans.problem import CacheShape, Problem
from mpjax.kernels.attention.plans.rule import plan_by_rule
from mpjax.kernels.attention.plans.split_rule import SMALL_KEYS
from mpjax.kernels.device import Limits
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.plans import Operation, Plan

PAGE_SIZE = 128  # tokens of a page, in measurements of plans


class Key(NamedTuple):
    """The key of a measured plan: KV format, heads, and buckets of rows, batch and tokens."""

    format: str  # as str(KVFormat)
    kv_heads: int
    head_dim: int
    is_varlen: bool
    rows: int
    batch: int
    tokens: int

    def problem(self, limits: Limits) -> Problem:
        """The largest problem with this key, on a GPU with these limits, for pages of PAGE_SIZE."""
        cache = CacheShape(KVFormat.parse(self.format), self.kv_heads, self.head_dim, PAGE_SIZE)
        return Problem(self.batch, self.rows, self.tokens, cache, limits, self.is_varlen)


def bucket(number: int) -> int:
    """The smallest bucket that is at least `number`.

    Buckets are numbers of three binary digits followed by zeros, such as 7, 8, 10 and 12. A plan
    measured for a bucket serves the numbers down to the next smaller bucket, a fifth less at most,
    so that its programs still fill the GPU.
    """
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit


def _exact(problem: Problem) -> Key:
    """The key with a problem's exact sizes; page sizes are not part of it."""
    cache, sizes = problem.cache, (problem.rows, problem.batch, problem.tokens)
    heads = str(cache.format), cache.kv_heads, cache.head_dim
    return Key(*heads, problem.is_varlen, *sizes)


def _bucketed(key: Key) -> Key:
    format = str(KVFormat.parse(key.format))
    rows, batch, tokens = map(bucket, (key.rows, key.batch, key.tokens))
    return key._replace(format=format, rows=rows, batch=batch, tokens=tokens)


def _suits(problem: Problem, plan: Plan) -> bool:
    """Whether a problem can run with a plan of its key: the tiles may not fit its page size."""
    fits = plan.config.tile_keys <= max(problem.cache.page_size, SMALL_KEYS)
    return fits and why_unsound(plan.config, problem) is None


def _why_damaged(key: Key, plan: Plan) -> str | None:
    config: Any = plan.config
    return why_not_config(config)


OPERATION = Operation[Problem](
    name="attention",
    keys=Key,
    # KV8, 8x128, 4 or varlen 4, 16x4096
    levels=("{format}", "{kv_heads}x{head_dim}", "{is_varlen:varlen }{rows}", "{batch}x{tokens}"),
    configs={"triton": AttentionConfig},
    exact=_exact,
    bucketed=_bucketed,
    rule=plan_by_rule,
    candidates=candidates,
    suits=_suits,
    why_damaged=_why_damaged,
    invariant=invariant_plan,
)
plan_of = functools.partial(plans.plan_of, OPERATION)
forced = functools.partial(plans.forced, OPERATION)


def config_of(problem: Problem) -> AttentionConfig:
    """The configuration of the plan for a problem."""
    config = plan_of(problem).config
    assert isinstance(config, AttentionConfig)
    return config
