from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.bench import measure
from mpjax.kernels import Gate, WeightFormat, device
from mpjax.kernels.experts import plans as experts_plans
from mpjax.kernels.experts.plans import OPERATION
from mpjax.kernels.experts.shapes import MODELS, ExpertShape
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Plan
from mpjax.tuning import experts as tune_experts
from mpjax.tuning import products as tune
from mpjax.tuning.experts import ExpertsJob, make_jobs
from mpjax.tuning.products import Trial

GATE_UP = ExpertShape("small.gate_up", 2, 6, 128, 128, Gate())
DOWN = ExpertShape("small.down", 2, 6, 64, 128)
UINT4, UINT8 = WeightFormat.parse("uint4:g32"), WeightFormat.parse("uint8:g32")


def test_a_job_is_a_line_of_the_table():
    job = ExpertsJob(GATE_UP, UINT4, 16)
    assert job.operation is OPERATION
    assert OPERATION.names_of(job.key) == ("uint4:g32", "2/6 of 128x128 gated", "16")
    assert str(job) == "uint4:g32 small.gate_up, 16 tokens"
    plans = job.candidates()
    assert plans[0] == job.plan_by_rule()
    assert len(set(plans)) == len(plans) == tune_experts.CANDIDATES


def test_jobs_are_distinct_places_in_a_table():
    found = make_jobs([GATE_UP, DOWN], [UINT4, UINT8], [1, 13, 16])
    assert found == [
        ExpertsJob(shape, format, tokens)
        for format in (UINT4, UINT8)
        for shape in (GATE_UP, DOWN)
        for tokens in (1, 16)
    ]
    assert len({job.key for job in found}) == len(found)


def test_products_by_warpgroups_are_measured_in_their_layer():
    """Between whose products rows are not copied; those of no model, and of few tokens, alone."""
    (gate_up, down), format = MODELS["mixtral-8x7b"], WeightFormat.parse("uint4:g128")
    with device.described_as("NVIDIA H200"):
        found = {ExpertsJob(shape, format, 256).measured.name for shape in (gate_up, down)}
        assert found == {"mixtral-8x7b.mlp"}
        assert ExpertsJob(gate_up, format, 16).measured == gate_up
        other = dataclasses.replace(gate_up, name="other", experts=4)
        assert ExpertsJob(other, format, 256).measured == other


@pytest.fixture
def two_stacks(monkeypatch):
    """Two small stacks in turn, where a GPU's would fill its L2 cache."""
    monkeypatch.setattr(measure, "copies", lambda nbytes: 2)
    tune_experts._stacks.cache_clear()


@pytest.mark.parametrize("shape", [GATE_UP, DOWN])
def test_trials(shape, two_stacks, monkeypatch):
    """The second plan's program is right, and takes 30 µs for both stacks."""
    job = ExpertsJob(shape, UINT4, 4)
    plans = job.candidates()[:4]
    seen = []

    def compile(plan, shape, inputs, stacks):
        if plan == plans[0]:
            raise ValueError("shared memory\nmore")
        product = jax.jit(
            lambda x, stack: tune_experts.bench.layer_product(x, stack, gate=shape.gate)
        )

        def run(inputs, stacks):
            out = [product(*pair) for pair in zip(inputs, stacks, strict=True)]
            if plan == plans[2]:
                out[0] = out[0].at[0].set(jnp.nan)
            if plan == plans[3]:
                raise RuntimeError("CUDA_ERROR\nmore")
            return out

        return run

    def timer(program, inputs, stacks, *, iterations):
        seen.append((len(inputs), len(stacks)))
        return 30.0

    monkeypatch.setattr(tune_experts, "compile_experts", compile)
    monkeypatch.setattr(measure, "microseconds", timer)
    assert tune.try_job(job, plans) == [
        Trial(plans[0], problem="does not compile: ValueError: shared memory"),
        Trial(plans[1], 15.0),
        Trial(plans[2], problem="wrong by more than 0.8% on average"),
        Trial(plans[3], problem="does not run: RuntimeError: CUDA_ERROR"),
    ]
    assert seen == [(2, 2)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_a_program_multiplies_as_planned(two_stacks, monkeypatch):
    job, asked = ExpertsJob(DOWN, UINT4, 1), []

    def product(inputs, stack, *, gate):
        asked.append(experts_plans.plan_of(job.problem))
        return inputs[0].sum() + stack

    monkeypatch.setattr(tune_experts.bench, "layer_product", product)
    plans = job.candidates()[:2]
    inputs, stacks = [(jnp.ones(2),)], [jnp.float32(3.0)]
    programs = [tune_experts.compile_experts(plan, DOWN, inputs, stacks) for plan in plans]
    assert asked == plans
    assert [float(program(inputs, stacks)[0]) for program in programs] == [5.0, 5.0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [GATE_UP, DOWN])
def test_experts_are_tuned_on_the_gpu(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_experts, "CANDIDATES", 4)
    kind = device.kind()
    path = tmp_path / tables.file_name(kind)
    job = ExpertsJob(dataclasses.replace(shape, channels=256), UINT4, 16)
    [outcome] = tune.run([job], path, kind, {})
    assert outcome.entry is not None
    assert 1 < outcome.entry.microseconds < 1000
    assert outcome.heuristic_microseconds is not None
    assert outcome.entry.microseconds <= outcome.heuristic_microseconds
    assert not {problem for problem in outcome.problems if "compile" not in problem}
    assert isinstance(outcome.entry.plan, Plan)
