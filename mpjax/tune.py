"""Measures plans on this GPU; the fastest go into a table.

Here are the jobs of products with packed weights; those of attention are in `tune_attention`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.bench import measure
from mpjax.checkpoint import huggingface, restoring
from mpjax.checkpoint.description import is_saved
from mpjax.kernels import (
    ProductFormat,
    QuantizedTensor,
    WeightFormat,
    matmul,
    matmul_terms,
    quantize,
)
from mpjax.kernels.device import limits
from mpjax.kernels.gemm import plans as gemm_plans
from mpjax.kernels.gemm.plans import TABLES, Entry, Key, Plan, Problem
from mpjax.kernels.gemm.shapes import MODELS
from mpjax.kernels.plans.tables import Tables
from mpjax.loading import find_folder
from mpjax.models import Decoder, DecoderConfig, presets

GATE = 8e-3  # mean error over mean magnitude that a plan may have, in bfloat16
CHECKED_ROWS = 256
ITERATIONS = 10
# Compiling takes most of the time where few rows are multiplied, and running where many are.
CANDIDATES = 20
CANDIDATES_FOR_MANY_ROWS = 12
MANY_ROWS = 1024
# A model's next kernel adds the terms of a split product as it reads them. Up to so many rows they
# are few next to the weight, so that products are timed without the sum.
ROWS_OF_TERMS = 16

Shape = tuple[int, int]  # [input, output channels] of a weight
Program = Callable[..., Any]
Compile = Callable[["Plan", list[jax.Array], list[QuantizedTensor]], Program]
Timer = Callable[..., float]


class Job(Protocol):
    """One line of a table, to be measured on the default device."""

    @property
    def tables(self) -> Tables[Any]:
        """The tables of its operation."""

    @property
    def key(self) -> Any:
        """Its place in a table."""

    def plan_by_rule(self) -> Plan:
        """The plan that runs without a table, one of the candidates."""

    def candidates(self) -> list[Plan]:
        """The plans to try."""

    def try_on_gpu(self, plans: Sequence[Plan]) -> list[Trial]:
        """Measures plans, in their order."""


@dataclasses.dataclass(frozen=True)
class ProductJob:
    """One line of a table: x of `rows` rows, a bucket, times a weight [channels, outputs]."""

    format: WeightFormat
    channels: int
    outputs: int
    rows: int

    @property
    def problem(self) -> Problem:
        """The product, on the default device."""
        format = ProductFormat.of(self.format)
        return Problem(self.rows, format, self.channels, self.outputs, limits())

    @property
    def tables(self) -> Tables[Problem]:
        """Those of products."""
        return TABLES

    @property
    def key(self) -> Key:
        """Its place in a table."""
        return TABLES.key_of(self.problem)

    def plan_by_rule(self) -> Plan:
        """The plan that runs without a table."""
        return gemm_plans.plan_by_rule(self.problem)

    def candidates(self) -> list[Plan]:
        """The plans to try on this GPU."""
        most = CANDIDATES if self.rows < MANY_ROWS else CANDIDATES_FOR_MANY_ROWS
        return gemm_plans.candidates(self.problem, most)

    def try_on_gpu(self, plans: Sequence[Plan]) -> list[Trial]:
        """See `try_products`."""
        return try_products(self, plans)

    def __str__(self) -> str:
        return f"{self.key.format} {self.channels}x{self.outputs}, {self.rows} rows"


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of a plan: its time for one call, or the problem that ruled it out."""

    plan: Plan
    microseconds: float | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job: its entry, None where no plan did it, and the trials behind it.

    A job that the table already had comes with its entry and no trials.
    """

    job: Job
    entry: Entry | None
    trials: tuple[Trial, ...] = ()

    @property
    def problems(self) -> dict[str, int]:
        """How many plans each problem ruled out."""
        return dict(collections.Counter(t.problem for t in self.trials if t.problem is not None))

    @property
    def heuristic_microseconds(self) -> float | None:
        """The time of the plan that runs without a table, which is always tried."""
        plan = self.job.plan_by_rule()
        return next((trial.microseconds for trial in self.trials if trial.plan == plan), None)


def model_shapes(source: str) -> list[Shape]:
    """The weights [K, N] of a model's layers, each once, joined as `mpjax.load` joins them.

    source: a name in `known_models()`, or a checkpoint's folder or hub id. Raises CheckpointError
    for what is neither.
    """
    known = known_models()
    return known[source] if source in known else _shapes(*_read_config(find_folder(source)))


def known_models() -> dict[str, list[Shape]]:
    """The shapes of published models by name, such as `qwen3-8b`."""
    configs = {
        name.lower().replace("_", "-"): _shapes(Decoder, value)
        for name, value in vars(presets).items()
        if isinstance(value, DecoderConfig)
    }
    named = {
        name: [(shape.channels, shape.outputs) for shape in matrices]
        for name, matrices in MODELS.items()
    }
    return named | configs


def _shapes(decoder: type[Decoder], config: DecoderConfig) -> list[Shape]:
    shapes = [place.part_shapes(1)[0] for place in decoder.linear_places(config)]
    return list(dict.fromkeys(shapes))


def _read_config(folder: Path) -> tuple[type[Decoder], DecoderConfig]:
    if is_saved(folder):
        lm = restoring.abstract(folder)
        return type(lm.model), lm.config
    return huggingface.decoder_config(folder, huggingface.read_config(folder))


def make_jobs(
    shapes: Sequence[Shape], formats: Sequence[WeightFormat], rows: Sequence[int]
) -> list[ProductJob]:
    """Every format, shape and bucket of rows, each once; neighbours share their weights.

    Raises ValueError for a format that is not packed, or that a shape can't have.
    """
    for format in formats:
        if not format.is_packed:
            raise ValueError(f"{format} is a plain array, whose product XLA tunes by itself")
        for channels, _ in shapes:
            if format.group_size is not None and channels % format.group_size:
                raise ValueError(
                    f"{format}: {channels} input channels can't be split into groups of "
                    f"{format.group_size}"
                )
    buckets = sorted({gemm_plans.bucket(count) for count in rows})
    jobs = [
        ProductJob(format, *shape, bucket)
        for format in formats
        for shape in shapes
        for bucket in buckets
    ]
    return list(dict.fromkeys(jobs))


def stamp() -> dict[str, Any]:
    """What a table says about its measurements: commit, versions and driver."""
    found = measure.stamp()
    driver = found["driver"]
    return {
        "commit": found["commit"],
        "driver": driver[0]["driver_version"] if isinstance(driver, list) and driver else driver,
        "jax": found["versions"]["jax"],
        "mpjax": found["versions"]["mpjax"],
    }


def run(
    jobs: Sequence[Job],
    path: Path,
    device: str,
    stamp: Mapping[str, Any],
    *,
    again: bool = False,
    try_plans: Callable[[Any, list[Plan]], list[Trial]] | None = None,
) -> Iterator[Outcome]:
    """Does the jobs in turn, and records each in the table at `path` as soon as it is done.

    again: measure also what the table has. try_plans: measures a job's plans; by default, it does
    so itself. Raises TableError, before anything is measured, where the table is damaged.
    """
    exists = os.path.lexists(path)
    known = {t: t.read(path, device).entries if exists else {} for t in {j.tables for j in jobs}}
    for job in jobs:
        if not again and (entry := known[job.tables].get(job.key)) is not None:
            yield Outcome(job, entry)
            continue
        plans = job.candidates()
        trials = tuple(try_plans(job, plans) if try_plans else job.try_on_gpu(plans))
        timed = [(t.microseconds, t.plan) for t in trials if t.microseconds is not None]
        if not timed:
            yield Outcome(job, None, trials)
            continue
        microseconds, plan = min(timed, key=lambda pair: pair[0])
        entry = Entry(plan, microseconds)
        job.tables.record(path, device, {job.key: entry}, stamp)
        yield Outcome(job, entry, trials)


def try_products(
    job: ProductJob,
    plans: Sequence[Plan],
    *,
    compile: Compile | None = None,
    timer: Timer = measure.microseconds,
) -> list[Trial]:
    """Measures plans on the default device, in their order; wrong answers get no time.

    Every product reads another weight and another x, together larger than the L2 cache. All plans
    compile at the same time, before the first is measured. compile, timer: for tests.
    """
    weights = _weights(job.format, job.channels, job.outputs)
    xs = [
        jax.random.normal(jax.random.key(i), (job.rows, job.channels), jnp.bfloat16)
        for i in range(len(weights))
    ]
    exact = _reference(xs[0], weights[0])
    compile = compile or compile_products
    programs = compile_all(lambda plan: compile(plan, xs, weights), plans)

    def error_of(products: list[jax.Array]) -> float:
        return relative_error(_checked_rows(_sum(products[0])), exact)

    def time_of(program: Program) -> float:
        return timer(program, xs, weights, iterations=ITERATIONS) / len(weights)

    return [
        try_program(plan, program, lambda run: error_of(run(xs, weights)), time_of)
        for plan, program in zip(plans, programs, strict=True)
    ]


def try_program(
    plan: Plan,
    program: Program | Exception,
    error_of: Callable[[Program], float],
    time_of: Callable[[Program], float],
) -> Trial:
    """Measures a compiled plan, or says why there is none.

    error_of: the mean error over the mean magnitude of a program's results, which must be below
    GATE. time_of: microseconds of one call.
    """
    if isinstance(program, Exception):
        return Trial(plan, problem=_sentence("does not compile", program))
    try:
        if not error_of(program) < GATE:
            return Trial(plan, problem=f"wrong by more than {GATE:.1%} on average")
        return Trial(plan, time_of(program))
    except Exception as failure:
        return Trial(plan, problem=_sentence("does not run", failure))


def compile_products(
    plan: Plan, xs: list[jax.Array], weights: list[QuantizedTensor]
) -> Callable[..., Any]:
    """A program that multiplies each x by its weight as the plan says, one after the other."""
    # One trace serves all of them, and XLA compiles its kernel once.
    few = xs[0].shape[0] <= ROWS_OF_TERMS
    product = jax.jit(lambda x, weight: (matmul_terms if few else matmul)(x, weight))

    def each(xs: list[jax.Array], weights: list[QuantizedTensor]) -> list[jax.Array]:
        results: list[jax.Array] = []
        for x, weight in zip(xs, weights, strict=True):
            if results:  # a chain, so that XLA merges no kernels of neighbours
                results[-1], x = jax.lax.optimization_barrier((results[-1], x))
            results.append(product(x, weight))
        return results

    with gemm_plans.forced(plan):
        lowered = measure.serial_jit(each).lower(xs, weights)
    return lowered.compile()


@functools.lru_cache(maxsize=1)  # the next job has other rows, but most often the same weights
def _weights(format: WeightFormat, channels: int, outputs: int) -> list[QuantizedTensor]:
    dense = jax.random.normal(jax.random.key(0), (channels, outputs), jnp.bfloat16)
    weight = quantize(dense, format)
    assert isinstance(weight, QuantizedTensor)  # make_jobs sees to that
    copies = range(measure.copies(weight.nbytes) - 1)
    return [weight, *(jax.tree.map(jnp.copy, weight) for _ in copies)]


def _checked_rows(x: jax.Array) -> jax.Array:
    """Rows from all over x, so that every tile height is caught out at its edges."""
    chosen = np.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECKED_ROWS)).astype(int)
    return x[chosen]


def _reference(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    return jax.jit(functools.partial(matmul, implementation="reference"))(_checked_rows(x), weight)


@jax.jit
def _mean_error(found: jax.Array, exact: jax.Array) -> jax.Array:
    found, exact = found.astype(jnp.float32), exact.astype(jnp.float32)
    return jnp.abs(found - exact).mean() / jnp.abs(exact).mean()


def _sum(product: jax.Array) -> jax.Array:
    return product.sum(0) if product.ndim == 3 else product


def relative_error(found: jax.Array, exact: jax.Array) -> float:
    """Mean error over mean magnitude."""
    return float(_mean_error(found, exact))


def compile_all(
    compile: Callable[[Plan], Program], plans: Sequence[Plan]
) -> list[Program | Exception]:
    """Programs in the order of the plans, or the errors in their place; all compile at once."""

    def attempt(plan: Plan) -> Program | Exception:
        try:
            return compile(plan)
        except Exception as error:
            return error

    executor = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        return list(executor.map(attempt, plans))
    finally:  # interrupted, what has not begun never begins
        executor.shutdown(wait=True, cancel_futures=True)


def _sentence(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{what}: {type(error).__name__}: {lines[0] if lines else 'no message'}"
