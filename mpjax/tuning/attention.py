"""Tuning jobs (`mpjax.tuning.products`) for attention over the paged cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.bench import attention as bench
from mpjax.bench import measure
from mpjax.bench.attention import Call
from mpjax.kernels import KVFormat, Span, paged_attention
from mpjax.kernels.attention import plans as attention_plans
from mpjax.kernels.attention.plans import Plan, Problem
from mpjax.kernels.attention.shapes import AttentionShape
from mpjax.kernels.device import limits
from mpjax.kernels.plans import Operation
from mpjax.tuning import products as tune
from mpjax.tuning.products import Job, Measurement, Program

CANDIDATES = 20


@dataclasses.dataclass(frozen=True)
class AttentionJob(Job):
    """The job that tunes attention of a shape over a cache in a KV format.

    The tuned plan applies to all shapes in the same buckets of sizes.
    """

    operation: ClassVar[Operation[Any]] = attention_plans.OPERATION
    shape: AttentionShape
    format: KVFormat

    @property
    def problem(self) -> Problem:
        """The tuned problem, on the default device."""
        shape, size = self.shape, attention_plans.PAGE_SIZE
        rows = shape.queries * shape.query_heads // shape.kv_heads
        cache = attention_plans.CacheShape(self.format, shape.kv_heads, shape.head_dim, size)
        tokens = -(-max(shape.lengths) // size) * size
        return Problem(shape.batch, rows, tokens, cache, limits())

    @property
    def most_candidates(self) -> int:
        """The most plans to try."""
        return CANDIDATES

    def measurement(self) -> Measurement:
        """How plans are compiled, checked and timed."""
        return _measurement(self)

    def __str__(self) -> str:
        return f"{self.format} {self.shape.name}"


def make_jobs(shapes: Sequence[AttentionShape], formats: Sequence[KVFormat]) -> list[AttentionJob]:
    """A job for every combination of format and shape, without repeated table keys.

    Raises ValueError for a shape with one longer sequence: a table's keys hold no lengths.
    """
    for shape in shapes:
        if shape.longest is not None:
            raise ValueError(
                f"{shape.name} has one longer sequence, and a table's entry serves all lengths up "
                "to a maximum: choose a shape whose sequences are equally long"
            )
    jobs = [AttentionJob(shape, format) for format in formats for shape in shapes]
    return list({job.key: job for job in reversed(jobs)}.values())[::-1]


def _measurement(job: AttentionJob) -> Measurement:
    """How plans are measured: by calls with different caches, together larger than the L2 cache."""
    calls = _calls(job)
    checked = _checked(calls[0])
    exact = jax.jit(functools.partial(_attend, implementation="reference"))(*checked)

    def error_of(program: Program) -> float:
        batch, queries = exact.shape[:2]
        return measure.relative_error(program(*calls[0])[:batch, -queries:], exact)

    def time_of(program: Program) -> float:
        each = measure.Unjitted(lambda: [program(*call) for call in calls])
        return tune.microseconds(each) / len(calls)

    return Measurement(lambda plan: compile_attention(plan, calls[0]), error_of, time_of)


def compile_attention(plan: Plan, call: Call) -> Program:
    """Compiles a call of attention with a plan."""
    attend = functools.partial(_attend, implementation="triton")
    with attention_plans.forced(plan):
        # A new function, so that `jit` doesn't reuse another plan's trace.
        lowered = measure.serial_jit(lambda *arguments: attend(*arguments)).lower(*call)
    return lowered.compile()


def _attend(*call: Any, implementation: Any) -> jax.Array:
    return paged_attention(*call, implementation=implementation, **bench.AS_IN_A_MODEL)


def _calls(job: AttentionJob) -> list[Call]:
    """Calls of the same shape whose caches together are larger than the L2 cache."""
    shape = job.shape
    pages, block_tables = bench.fill(shape, job.format)
    counts = jnp.full(shape.batch, shape.queries, jnp.int32)
    starts = jnp.asarray(shape.lengths, jnp.int32) - counts
    count = measure.copies(sum(leaf.nbytes for leaf in jax.tree.leaves(pages)))
    copies = [pages, *(jax.tree.map(jnp.copy, pages) for _ in range(count - 1))]
    queries, span = bench.queries(shape), Span(block_tables, starts, counts)
    return [(queries, copy, span) for copy in copies]


def _checked(call: Call) -> Call:
    """The part of a call that fits the reference's memory: some sequences' last tokens."""
    queries, pages, span = call
    tokens = span.block_tables.shape[1] * pages.page_size
    batch = max(1, min(len(span.starts), bench.CHECKED_TOKENS // tokens))
    left = max(0, queries.shape[1] - bench.CHECKED_QUERIES)
    if pages.residual is not None:
        residual = jax.tree.map(lambda x: x[:batch], pages.residual)
        pages = dataclasses.replace(pages, residual=residual)
    span = jax.tree.map(lambda x: x[:batch], span)
    span = Span(span.block_tables, span.starts + left, span.counts - left)
    return queries[:batch, left:], pages, span
