"""Jobs of the tuner (`mpjax.tuning.products`) for the products of tokens and their experts."""

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
    """A table's entry for the product of tokens with experts of a shape.

    tokens: the largest number of tokens of a bucket.
    """

    operation: ClassVar[Operation[Any]] = experts_plans.OPERATION
    shape: ExpertShape
    format: WeightFormat
    tokens: int

    @property
    def problem(self) -> Problem:
        """The product on the default device."""
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
        """How plans are tried."""
        return _measurement(self)

    @property
    def measured(self) -> AnyShape:
        """The products whose time is measured: the shape's, or both of a layer.

        Warpgroups compute both of a layer, between which rows stay in the order of experts. One of
        them alone would count copies that a layer does not make.
        """
        by_warpgroups = self.plan_by_rule().implementation == "mosaic"
        return layer_of(self.shape) if by_warpgroups else self.shape

    def __str__(self) -> str:
        return f"{self.key.format} {self.shape.name}, {self.tokens} tokens"


def make_jobs(
    shapes: Sequence[ExpertShape], formats: Sequence[WeightFormat], tokens: Sequence[int]
) -> list[ExpertsJob]:
    """A job for every combination of format, shape and bucket of tokens, each once.

    Jobs with the same stacks are neighbours. Raises ValueError for a shape that the groups of a
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
    """How plans are tried: by products of different stacks, together larger than the L2 cache.

    Tokens choose their experts at random. Where both products of a layer are measured, both have
    the plan.
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
    """Compiles a program that multiplies by each stack with a plan."""
    product = functools.partial(bench.layer_product, gate=shape.gate)
    with experts_plans.forced(plan):
        # A new function, so that `jit` does not find the trace of another plan.
        return measure.compiled(
            lambda inputs, stacks: list(map(product, inputs, stacks)), inputs, stacks
        )


_stacks = functools.lru_cache(maxsize=1)(bench.random_stacks)  # the next job mostly has the same
