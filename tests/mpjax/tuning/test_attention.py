from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.bench import measure
from mpjax.kernels import KVFormat, device, paged_attention
from mpjax.kernels.attention import plans as attention_plans
from mpjax.kernels.attention.plans import OPERATION, CacheShape, Plan, Problem
from mpjax.kernels.attention.shapes import AttentionShape
from mpjax.kernels.plans import tables
from mpjax.tuning import attention as tune_attention
from mpjax.tuning import products as tune
from mpjax.tuning.attention import AttentionJob, make_jobs
from mpjax.tuning.products import Trial

KV8, KV2 = KVFormat.parse("KV8"), KVFormat.parse("KV2")
SHAPE = AttentionShape(2, 4, 2, 64, 300)


def test_a_job_is_a_line_of_the_table():
    job = AttentionJob(dataclasses.replace(SHAPE, queries=3), KV2)
    assert job.problem == Problem(2, 6, 384, CacheShape(KV2, 2, 64, 128), device.limits())
    assert job.operation is OPERATION
    assert job.key == OPERATION.key_of(job.problem)
    assert str(job) == "KV2 b2-h4/2-d64-c300-q3"
    plans = job.candidates()
    assert plans[0] == job.plan_by_rule() == attention_plans.plan_by_rule(job.problem)
    assert len(set(plans)) == len(plans) <= tune_attention.CANDIDATES


def test_jobs_are_distinct_places_in_a_table():
    near = dataclasses.replace(SHAPE, context=350)  # the same pages
    other = dataclasses.replace(SHAPE, context=500)
    found = make_jobs([SHAPE, near, other], [KV8, KV2])
    expected = [AttentionJob(shape, format) for format in (KV8, KV2) for shape in (SHAPE, other)]
    assert found == expected


@pytest.fixture
def two_caches(monkeypatch):
    """Two small caches in turn, where a GPU's would fill its L2 cache."""
    monkeypatch.setattr(measure, "copies", lambda nbytes: 2)


@pytest.mark.parametrize("format", [KV8, KV2])
def test_trials(format, two_caches, monkeypatch):
    """On the second plan's program nothing is wrong; it takes 30 µs for both caches."""
    monkeypatch.setattr(tune_attention.bench, "CHECKED_TOKENS", 400)  # of one sequence
    job = AttentionJob(SHAPE, format)
    plans = job.candidates()[:4]
    right = jax.jit(lambda *call: paged_attention(*call, transformed=True))
    calls = []

    def compile(plan, call):
        def run(*call):
            calls.append(call)
            out = right(*call)
            assert out.shape == (2, 1, 4, 64)
            if plan == plans[2]:
                out = out.at[0, -1, -1].set(jnp.nan)
            if plan == plans[3]:
                raise RuntimeError("CUDA_ERROR\nmore")
            return out

        if plan == plans[0]:
            raise ValueError("shared memory\nmore")
        return run

    def timer(program, *, iterations):
        before = len(calls)
        program()
        first, second = calls[before:]
        assert first[1].keys.unsafe_buffer_pointer() != second[1].keys.unsafe_buffer_pointer()
        return 30.0

    monkeypatch.setattr(tune_attention, "compile_attention", compile)
    monkeypatch.setattr(measure, "microseconds", timer)
    assert tune.try_job(job, plans) == [
        Trial(plans[0], problem="does not compile: ValueError: shared memory"),
        Trial(plans[1], 15.0),
        Trial(plans[2], problem="wrong by more than 0.8% on average"),
        Trial(plans[3], problem="does not run: RuntimeError: CUDA_ERROR"),
    ]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_a_program_attends_as_planned(two_caches, monkeypatch):
    call = tune_attention._calls(AttentionJob(SHAPE, KV8))[0]
    asked = []

    def attend(*call, implementation, transformed):
        assert (implementation, transformed) == ("triton", True)
        asked.append(attention_plans.plan_of(AttentionJob(SHAPE, KV8).problem))
        return paged_attention(*call, transformed=transformed)

    monkeypatch.setattr(tune_attention, "paged_attention", attend)
    plans = AttentionJob(SHAPE, KV8).candidates()[:2]
    programs = [tune_attention.compile_attention(plan, call) for plan in plans]
    assert asked == plans
    assert jnp.array_equal(programs[0](*call), programs[1](*call))


@pytest.mark.gpu
@pytest.mark.parametrize("format", [KV8, KV2])
def test_attention_is_tuned_on_the_gpu(format, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_attention, "CANDIDATES", 4)
    kind = device.kind()
    path = tmp_path / tables.file_name(kind)
    [outcome] = tune.run([AttentionJob(SHAPE, format)], path, kind, {})
    assert outcome.entry is not None
    assert 1 < outcome.entry.microseconds < 1000
    assert outcome.heuristic_microseconds is not None
    assert outcome.entry.microseconds <= outcome.heuristic_microseconds
    wrong = {problem for problem in outcome.problems if "compile" not in problem}
    assert not wrong
    assert isinstance(outcome.entry.plan, Plan)
