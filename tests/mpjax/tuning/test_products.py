from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.bench import measure
from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.saving import save
from mpjax.kernels import WeightFormat, device, matmul
from mpjax.kernels.gemm import plans as gemm_plans
from mpjax.kernels.gemm import shapes
from mpjax.kernels.gemm.plans import OPERATION, Entry, Plan, TritonConfig
from mpjax.kernels.plans import tables
from mpjax.models import presets
from mpjax.tuning import products as tune
from mpjax.tuning.products import ProductJob, Trial
from tests.mpjax.conftest import TINY

DEVICE = "NVIDIA Test 1"
STAMP = {"commit": "abc"}
UINT4, INT8 = WeightFormat.parse("uint4:g128"), WeightFormat.parse("int8/int8")
JOBS = [ProductJob(UINT4, 256, 64, rows) for rows in (16, 32, 64)]
FUSED = [Plan("triton", TritonConfig(16, 16 * n, 1, 1, 2)) for n in (1, 2, 4)]


class Trials:
    """Stands in for the GPU: remembers the jobs, and finds the second plan the fastest."""

    def __init__(self, *, interrupt_at=None, nothing_works_at=None):
        self.jobs = []
        self.interrupt_at, self.nothing_works_at = interrupt_at, nothing_works_at

    def __call__(self, job, plans):
        if job.rows == self.interrupt_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        if job.rows == self.nothing_works_at:
            return [Trial(plan, problem="does not run: x") for plan in plans]
        times = [9.0, 5.0, *(6.0 for _ in plans[2:])]
        trials = [Trial(plan, time) for plan, time in zip(plans, times, strict=True)]
        return [*trials[:-1], Trial(plans[-1], problem="wrong")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuned" / tables.file_name(DEVICE)


@pytest.fixture
def run(path, monkeypatch):
    def call(trials, jobs=JOBS, **options):
        monkeypatch.setattr(tune, "try_job", trials)
        return list(tune.run(jobs, path, DEVICE, STAMP, **options))

    return call


def test_shapes_of_published_models():
    expected = {(s.channels, s.outputs) for s in shapes.QWEN3_8B}
    assert set(tune.model_shapes("qwen3-8b")) == expected
    assert len(tune.model_shapes("llama3-70b")) == 4
    # Written from the model's description: 32 heads and 8 KV heads of 128 channels.
    config = presets.LLAMA3_1_8B
    assert set(tune.model_shapes("llama3-1-8b")) == {
        (4096, (32 + 2 * 8) * 128),
        (4096, 4096),
        (4096, 2 * config.intermediate_size),
        (config.intermediate_size, 4096),
    }


def test_shapes_of_a_checkpoint(tiny, tiny_folder, tmp_path):
    hidden, inner = TINY["hidden_size"], TINY["intermediate_size"]
    heads, kv_heads = TINY["num_attention_heads"], TINY["num_key_value_heads"]
    expected = {
        (hidden, (heads + 2 * kv_heads) * TINY["head_dim"]),
        (heads * TINY["head_dim"], hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    }
    assert set(tune.model_shapes(str(tiny_folder))) == expected
    save(tiny, tmp_path / "saved")
    assert set(tune.model_shapes(str(tmp_path / "saved"))) == expected
    with pytest.raises(CheckpointError, match="does not exist"):
        tune.model_shapes("qwen9-8b")


def test_jobs_are_distinct_and_keep_weights_together():
    symmetric = WeightFormat.parse("uint4:g128:sym")
    jobs = tune.make_jobs([(256, 64), (128, 32)], [UINT4, symmetric, INT8], [16, 33, 40])
    assert jobs[:3] == [
        ProductJob(UINT4, 256, 64, 16),
        ProductJob(UINT4, 256, 64, 64),
        ProductJob(UINT4, 128, 32, 16),
    ]
    assert len(jobs) == len(set(jobs)) == 3 * 2 * 2
    assert str(jobs[0]) == "uint4:g128 256x64, 16 rows"


def test_the_fastest_plan_goes_into_the_table(path, run):
    outcomes = run(Trials())
    table = tables.read(OPERATION, path, DEVICE)
    assert table.stamps == (STAMP,)
    assert list(table.entries) == [job.key for job in JOBS]
    for job, outcome in zip(JOBS, outcomes, strict=True):
        plans = job.candidates()
        assert outcome.entry == table.entries[job.key] == Entry(plans[1], 5.0)
        assert outcome.heuristic_microseconds == 9.0
        assert outcome.problems == {"wrong": 1}


def test_what_the_table_has_is_not_measured_again(run):
    run(Trials(), JOBS[:1])
    trials = Trials()
    outcomes = run(trials)
    assert trials.jobs == JOBS[1:]
    assert outcomes[0].entry == outcomes[1].entry._replace(plan=outcomes[0].entry.plan)
    assert (outcomes[0].trials, outcomes[0].heuristic_microseconds) == ((), None)

    trials = Trials()
    run(trials, again=True)
    assert trials.jobs == JOBS


def test_an_interrupt_keeps_what_was_measured(path, run):
    with pytest.raises(KeyboardInterrupt):
        run(Trials(interrupt_at=64))
    assert list(tables.read(OPERATION, path, DEVICE).entries) == [job.key for job in JOBS[:2]]
    trials = Trials()
    run(trials)
    assert trials.jobs == JOBS[2:]


def test_a_job_that_nothing_does_has_no_entry(path, run):
    outcomes = run(Trials(nothing_works_at=32))
    assert [outcome.entry is None for outcome in outcomes] == [False, True, False]
    assert outcomes[1].problems == {"does not run: x": len(outcomes[1].trials)}
    assert list(tables.read(OPERATION, path, DEVICE).entries) == [JOBS[0].key, JOBS[2].key]


@pytest.mark.parametrize("again", [True, False])
def test_a_damaged_table_stops_it_before_it_measures(path, run, again):
    path.parent.mkdir()
    path.write_text("{")
    trials = Trials()
    with pytest.raises(tables.TableError, match=path.name):
        run(trials, again=again)
    assert trials.jobs == []


@pytest.fixture
def two_weights(monkeypatch):
    """Two small weights in turn, where a GPU's would fill its cache."""
    monkeypatch.setattr(measure, "copies", lambda nbytes: 2)
    tune._weights.cache_clear()
    yield
    tune._weights.cache_clear()


class Program:
    """A compiled plan: computes by the reference and takes `microseconds`, for both weights."""

    def __init__(self, microseconds, wrong=False):
        self.microseconds, self.wrong = microseconds, wrong

    def __call__(self, xs, weights):
        assert len(xs) == len(weights) == 2
        results = [
            matmul(x, w, implementation="reference") for x, w in zip(xs, weights, strict=True)
        ]
        if self.wrong:  # in one row, as where a tile sticks out
            results[0] = results[0].at[-1].set(jnp.nan)
        return results


def test_trials(two_weights, monkeypatch):
    programs = {
        FUSED[0]: Program(30.0),
        FUSED[1]: Program(10.0, wrong=True),
        FUSED[2]: Program(None),
        Plan("dequantize"): Program(20.0),
    }

    def compile(plan, xs, weights):
        if plan not in programs:
            raise ValueError("shared memory\nmore")
        return programs[plan]

    def microseconds(program, xs, weights, iterations):
        if program.microseconds is None:
            raise RuntimeError("CUDA_ERROR\nmore")
        return program.microseconds

    monkeypatch.setattr(tune, "compile_products", compile)
    monkeypatch.setattr(measure, "microseconds", microseconds)
    plans = [Plan("xla"), *programs]
    assert tune.try_job(JOBS[1], plans) == [
        Trial(Plan("xla"), problem="does not compile: ValueError: shared memory"),
        Trial(FUSED[0], 15.0),
        Trial(FUSED[1], problem="wrong by more than 0.8% on average"),
        Trial(FUSED[2], problem="does not run: RuntimeError: CUDA_ERROR"),
        Trial(Plan("dequantize"), 10.0),
    ]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_a_program_computes_each_product_as_planned(two_weights):
    weights = tune._weights(INT8, 256, 48)
    xs = [jnp.full((3, 256), i + 1, jnp.bfloat16) for i in range(2)]
    asked, planned = [], gemm_plans.plan_of

    def plan_of(problem):
        asked.append(planned(problem))
        return Plan("xla")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_plans, "plan_of", plan_of)
        program = tune.compile_products(FUSED[0], xs, weights)
    assert set(asked) == {FUSED[0]}
    results = program(xs, weights)
    for x, weight, result in zip(xs, weights, results, strict=True):
        assert jnp.allclose(result, matmul(x, weight, implementation="reference")[None], rtol=1e-2)


@pytest.mark.gpu
def test_a_small_product_is_tuned_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "CANDIDATES", 4)
    kind = device.kind()
    path = tmp_path / tables.file_name(kind)
    [outcome] = tune.run([ProductJob(UINT4, 512, 384, 16)], path, kind, STAMP)
    assert outcome.entry is not None
    assert 1 < outcome.entry.microseconds < 1000
    assert outcome.heuristic_microseconds is not None
    assert outcome.entry.microseconds <= outcome.heuristic_microseconds
    assert not outcome.problems
