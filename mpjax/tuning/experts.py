"""Tuning jobs (`mpjax.tuning.products`) for the products of tokens with their experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from mpjax.bench import experts as bench
from mpjax.bench import measure
from mpjax.kernels import ProductFormat, WeightFormat
from mpjax.kernels.device import limits
from mpjax.kernels.experts import plans as experts_plans
from mpjax.kernels.experts.plans import Problem
from mpjax.kernels.experts.shapes import AnyShape, ExpertShape, layer_of
from mpjax.kernels.plans import Operation, Plan
from mpjax.tuning import products as tune
from mpjax.tuning.products import Job, Measurement, Program

BUCKETS = tuple(2**power for power in range(14))  # of tokens, up to 8192
CANDIDATES = 24


@dataclasses.dataclass(frozen=True)
class ExpertsJob(Job):
    """The job that tunes the product of tokens with experts of a shape.

    tokens: the largest number of tokens of a bucket.
    """

    operation: ClassVar[Operation[Any]] = experts_plans.OPERATION
    shape: ExpertShape
    format: WeightFormat
    tokens: int

    @property
    def problem(self) -> Problem:
        """The tuned problem, on the default device."""
        shape, format = self.shape, ProductFormat.of(self.format)
        return Problem(
            self.tokens,
            shape.per_token,
            shape.experts,
            format,
            shape.channels,
            shape.outputs,
            shape.gate is not None,
            limits(),
        )

    @property
    def most_candidates(self) -> int:
        """The most plans to try."""
        return CANDIDATES

    def measurement(self) -> Measurement:
        """How plans are compiled, checked and timed."""
        return _measurement(self)

    @property
    def measured(self) -> AnyShape:
        """The products to time: the shape's, or both products of the layer.

        The warpgroup kernels compute both products of a layer, with rows sorted by expert in
        between. Timing one of them would include copies that a layer doesn't make.
        """
        by_warpgroups = self.plan_by_rule().implementation == "mosaic"
        return layer_of(self.shape) if by_warpgroups else self.shape

    def __str__(self) -> str:
        return f"{self.key.format} {self.shape.name}, {self.tokens} tokens"


def make_jobs(
    shapes: Sequence[ExpertShape], formats: Sequence[WeightFormat], tokens: Sequence[int]
) -> list[ExpertsJob]:
    """A job for every combination of format, shape and bucket of tokens, each once.

    Jobs with the same weights are neighbours. Raises ValueError for a shape that the groups of a
    format don't divide.
    """
    for format in formats:
        for shape in shapes:
            tune.require_groups(format, shape.channels, f" of {shape.name}")
    buckets = sorted({experts_plans.bucket(count) for count in tokens})
    return [
        ExpertsJob(shape, format, bucket)
        for format in formats
        for shape in shapes
        for bucket in buckets
    ]


def _measurement(job: ExpertsJob) -> Measurement:
    """How plans are measured: by products with different stacks, together larger than the L2.

    Tokens choose experts at random. If both products of a layer are timed, both use the plan.
    """
    shape = job.measured
    stacks = _stacks(shape, str(job.format))
    inputs = [bench.random_inputs(shape, job.tokens, seed) for seed in range(len(stacks))]
    return Measurement(
        lambda plan: compile_experts(plan, shape, inputs, stacks),
        lambda program: bench.mean_error(program(inputs, stacks)[0], inputs[0], stacks[0], shape),
        lambda program: tune.microseconds(program, inputs, stacks) / len(stacks),
    )


def compile_experts(plan: Plan, shape: AnyShape, inputs: Any, stacks: Any) -> Program:
    """Compiles a program of one product with each stack, with a plan."""
    product = functools.partial(bench.layer_product, gate=shape.gate)
    with experts_plans.forced(plan):
        # A new function, so that `jit` doesn't reuse another plan's trace.
        return measure.compiled(
            lambda inputs, stacks: list(map(product, inputs, stacks)), inputs, stacks
        )


_stacks = functools.lru_cache(maxsize=1)(bench.random_stacks)  # mostly for the next job
