"""Measures plans on this GPU and writes the fastest to a table.

The jobs here are products with packed weights. Attention's jobs are in `mpjax.tuning.attention`,
those of experts in `mpjax.tuning.experts`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

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
from mpjax.kernels.gemm.plans import Entry, Plan, Problem
from mpjax.kernels.gemm.shapes import MODELS
from mpjax.kernels.plans import Operation, tables
from mpjax.loading import find_folder
from mpjax.models import Decoder, DecoderConfig, presets

CHECKED_ROWS = 256
ITERATIONS = 10
# Number of plans to try. With many rows, running takes longer than compiling, so fewer are tried.
CANDIDATES = 20
CANDIDATES_FOR_MANY_ROWS = 12
MANY_ROWS = 1024
# In a model, the next kernel sums the partial results of a split product. Up to this number of rows
# that costs little beside reading the weight, so products are timed without the sum.
ROWS_OF_TERMS = 16

Shape = tuple[int, int]  # [input, output channels] of a weight
Program = Callable[..., Any]


class Measurement(NamedTuple):
    """How plans are compiled, checked and timed on the default device.

    compile: plan → program. error_of: program → relative error. time_of: program → microseconds of
    a call.
    """

    compile: Callable[[Plan], Program]
    error_of: Callable[[Program], float]
    time_of: Callable[[Program], float]


class Job(Protocol):
    """A table entry to be measured on the default device."""

    operation: ClassVar[Operation[Any]]

    @property
    def problem(self) -> Any:
        """The problem that the entry's plan is for, on the default device."""

    @property
    def most_candidates(self) -> int:
        """The most plans to try."""

    @property
    def key(self) -> Any:
        """The key of the job's entry in a table."""
        return self.operation.key_of(self.problem)

    def plan_by_rule(self) -> Plan:
        """The plan that runs without a table; it is among the candidates."""
        return self.operation.rule(self.problem)

    def candidates(self) -> list[Plan]:
        """Plans to try on this GPU."""
        return self.operation.candidates(self.problem, self.most_candidates)

    def measurement(self) -> Measurement:
        """How plans are compiled, checked and timed."""


@dataclasses.dataclass(frozen=True)
class ProductJob(Job):
    """The job that tunes a product: x [rows, channels] times a weight [channels, outputs].

    rows: the largest number of rows of a bucket.
    """

    operation: ClassVar[Operation[Any]] = gemm_plans.OPERATION
    format: WeightFormat
    channels: int
    outputs: int
    rows: int

    @property
    def problem(self) -> Problem:
        """The tuned problem, on the default device."""
        format = ProductFormat.of(self.format)
        return Problem(self.rows, format, self.channels, self.outputs, limits())

    @property
    def most_candidates(self) -> int:
        """The most plans to try."""
        return CANDIDATES if self.rows < MANY_ROWS else CANDIDATES_FOR_MANY_ROWS

    def measurement(self) -> Measurement:
        """How plans are compiled, checked and timed."""
        return _measurement(self)

    def __str__(self) -> str:
        return f"{self.key.format} {self.channels}x{self.outputs}, {self.rows} rows"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of measuring a plan: microseconds of a call, or why the plan is unusable."""

    plan: Plan
    microseconds: float | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a job: its table entry, and the trials of its plans.

    entry: None if no plan is usable. trials: empty if the table already had the entry.
    """

    job: Job
    entry: Entry | None
    trials: tuple[Trial, ...] = ()

    @property
    def problems(self) -> dict[str, int]:
        """Number of unusable plans for each reason."""
        return dict(collections.Counter(t.problem for t in self.trials if t.problem is not None))

    @property
    def heuristic_microseconds(self) -> float | None:
        """Microseconds of the plan that runs without a table; None if it is unusable."""
        plan = self.job.plan_by_rule()
        return next((trial.microseconds for trial in self.trials if trial.plan == plan), None)


def model_shapes(source: str) -> list[Shape]:
    """Distinct shapes (K, N) of the weights in a model's layers, fused as `mpjax.load` does.

    source: a name in `known_models()`, or a checkpoint's folder or hub id. Raises CheckpointError
    for anything else.
    """
    known = known_models()
    return known[source] if source in known else _shapes(*_read_config(find_folder(source)))


def known_models() -> dict[str, list[Shape]]:
    """Shapes of the weights of published models, by name, such as `qwen3-8b`."""
    configs = {
        name.replace(".", "-"): _shapes(decoder, config)
        for name, (decoder, config) in presets.PUBLISHED.items()
    }
    named = {
        name: [(shape.channels, shape.outputs) for shape in matrices]
        for name, matrices in MODELS.items()
    }
    return named | configs


def _shapes(decoder: type[Decoder], config: DecoderConfig) -> list[Shape]:
    shapes = [place.part_shapes(1)[0] for place in decoder.linear_places(config)]
    # Experts' weights, which have a third axis, are jobs of `mpjax.tuning.experts`.
    return list(dict.fromkeys((shape[0], shape[1]) for shape in shapes if len(shape) == 2))


def _read_config(folder: Path) -> tuple[type[Decoder], DecoderConfig]:
    if is_saved(folder):
        lm = restoring.abstract(folder)
        return type(lm.model), lm.config
    return huggingface.decoder_config(folder, huggingface.read_config(folder))


def make_jobs(
    shapes: Sequence[Shape], formats: Sequence[WeightFormat], rows: Sequence[int]
) -> list[ProductJob]:
    """A job for every combination of format, shape and bucket of rows, each once.

    Jobs with the same weight are neighbours. Raises ValueError for a format that is not packed, and
    for a shape that the format's groups don't divide.
    """
    for format in formats:
        if not format.is_packed:
            raise ValueError(
                f"{format} is not packed, and XLA tunes its products itself: choose a packed format"
            )
        for channels, _ in shapes:
            require_groups(format, channels)
    buckets = sorted({gemm_plans.bucket(count) for count in rows})
    jobs = [
        ProductJob(format, *shape, bucket)
        for format in formats
        for shape in shapes
        for bucket in buckets
    ]
    return list(dict.fromkeys(jobs))


def stamp() -> dict[str, Any]:
    """Commit, versions and driver: the metadata of measurements in a table."""
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
) -> Iterator[Outcome]:
    """Runs jobs in turn, writes each entry to the table at `path`, and yields each outcome.

    device: the GPU's name in the table. stamp: as `stamp` returns it. again: whether to measure
    jobs whose entries the table already has. Raises TableError, before anything is measured, for a
    damaged table.
    """
    exists = os.path.lexists(path)
    operations = {job.operation for job in jobs}
    known = {o: tables.read(o, path, device).entries if exists else {} for o in operations}
    for job in jobs:
        if not again and (entry := known[job.operation].get(job.key)) is not None:
            yield Outcome(job, entry)
            continue
        trials = tuple(try_job(job, job.candidates()))
        timed = [(t.microseconds, t.plan) for t in trials if t.microseconds is not None]
        if not timed:
            yield Outcome(job, None, trials)
            continue
        least, plan = min(timed, key=lambda pair: pair[0])
        entry = Entry(plan, least)
        tables.record(job.operation, path, device, {job.key: entry}, stamp)
        yield Outcome(job, entry, trials)


def _measurement(job: ProductJob) -> Measurement:
    """How plans are measured: by products with different weights and inputs x.

    The weights together are larger than the L2 cache.
    """
    weights = _weights(job.format, job.channels, job.outputs)
    xs = [
        jax.random.normal(jax.random.key(i), (job.rows, job.channels), jnp.bfloat16)
        for i in range(len(weights))
    ]
    reference = jax.jit(functools.partial(matmul, implementation="reference"))
    exact = reference(_checked_rows(xs[0]), weights[0])

    def error_of(program: Program) -> float:
        product = program(xs, weights)[0]
        product = product.sum(0) if product.ndim == 3 else product
        return measure.relative_error(_checked_rows(product), exact)

    return Measurement(
        lambda plan: compile_products(plan, xs, weights),
        error_of,
        lambda program: microseconds(program, xs, weights) / len(weights),
    )


def microseconds(function: Callable[..., Any], *arguments: Any) -> float:
    """The GPU time of a call in microseconds, the median of ITERATIONS."""
    return measure.microseconds(function, *arguments, iterations=ITERATIONS)


def require_groups(format: WeightFormat, channels: int, of: str = "") -> None:
    """Raises ValueError if the format's group size doesn't divide the input channels."""
    if format.group_size is not None and channels % format.group_size:
        raise ValueError(
            f"{format}: {channels} input channels{of} can't be split into groups of "
            f"{format.group_size}"
        )


def try_job(job: Job, plans: Sequence[Plan]) -> list[Trial]:
    """Measures plans on the default device; returns the trial of each plan, in order.

    All plans compile in parallel before the first is measured. The trial of a plan that failed, or
    whose relative error exceeds measure.GATE, has the reason instead of a time.
    """
    measurement = job.measurement()
    return [
        _try_program(plan, program, measurement)
        for plan, program in zip(plans, compile_all(measurement.compile, plans), strict=True)
    ]


def _try_program(plan: Plan, program: Program | Exception, measurement: Measurement) -> Trial:
    """The trial of a plan. program: the compiled plan, or the error of its compilation."""
    if isinstance(program, Exception):
        return Trial(plan, problem=_sentence("does not compile", program))
    try:
        if not measurement.error_of(program) < measure.GATE:
            return Trial(plan, problem=f"wrong by more than {measure.GATE:.1%} on average")
        return Trial(plan, measurement.time_of(program))
    except Exception as failure:
        return Trial(plan, problem=_sentence("does not run", failure))


def compile_products(
    plan: Plan, xs: list[jax.Array], weights: list[QuantizedTensor]
) -> Callable[..., Any]:
    """Compiles a program of successive products, each x with its weight, with a plan."""
    # With an inner `jit`, all products share one trace, and XLA compiles the kernel once.
    few = xs[0].shape[0] <= ROWS_OF_TERMS
    product = jax.jit(lambda x, weight: (matmul_terms if few else matmul)(x, weight))

    def each(xs: list[jax.Array], weights: list[QuantizedTensor]) -> list[jax.Array]:
        results: list[jax.Array] = []
        for x, weight in zip(xs, weights, strict=True):
            if results:  # each product waits for the previous one, so that XLA can't merge them
                results[-1], x = jax.lax.optimization_barrier((results[-1], x))
            results.append(product(x, weight))
        return results

    with gemm_plans.forced(plan):
        lowered = measure.serial_jit(each).lower(xs, weights)
    return lowered.compile()


@functools.lru_cache(maxsize=1)  # the next job usually has the same weights, with other rows
def _weights(format: WeightFormat, channels: int, outputs: int) -> list[QuantizedTensor]:
    dense = jax.random.normal(jax.random.key(0), (channels, outputs), jnp.bfloat16)
    weight = quantize(dense, format)
    assert isinstance(weight, QuantizedTensor)  # make_jobs refuses other formats
    copies = range(measure.copies(weight.nbytes) - 1)
    return [weight, *(jax.tree.map(jnp.copy, weight) for _ in copies)]


def _checked_rows(x: jax.Array) -> jax.Array:
    """CHECKED_ROWS rows evenly spread over x, to catch errors at the edges of tiles."""
    chosen = np.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECKED_ROWS)).astype(int)
    return x[chosen]


def compile_all(
    compile: Callable[[Plan], Program], plans: Sequence[Plan]
) -> list[Program | Exception]:
    """Compiles plans in parallel; returns each plan's program, or its error, in order."""

    def attempt(plan: Plan) -> Program | Exception:
        try:
            return compile(plan)
        except Exception as error:
            return error

    executor = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        return list(executor.map(attempt, plans))
    finally:  # after an interrupt, plans that have not begun to compile are dropped
        executor.shutdown(wait=True, cancel_futures=True)


def _sentence(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{what}: {type(error).__name__}: {lines[0] if lines else 'no message'}"
