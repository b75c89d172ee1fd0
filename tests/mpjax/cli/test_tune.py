from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpjax.cli.application import app
from mpjax.kernels import device
from mpjax.kernels.attention import plans as attention_plans
from mpjax.kernels.experts import plans as experts_plans
from mpjax.kernels.gemm.plans import BUCKETS, OPERATION
from mpjax.kernels.plans import tables
from mpjax.tuning import products as tune
from mpjax.tuning.products import Trial

KIND = "NVIDIA Test 1"
SHAPES = ["--shapes", "256x64,128x4096", "--rows", "1,64"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which the n-th plan of a product takes n µs more than 5; gives the jobs it did."""
    jobs = []

    def try_job(job, plans):
        jobs.append(job)
        trials = [Trial(plan, 5.0 + index) for index, plan in enumerate(plans[:-1])]
        return [*trials, Trial(plans[-1], problem="does not compile: ValueError: no room")]

    monkeypatch.setattr(tune, "try_job", try_job)
    monkeypatch.setattr(tune, "stamp", lambda: {"commit": "abc"})
    with device.described_as("NVIDIA Test 1"):
        yield jobs


def test_results_are_written_told_and_kept(gpu, tmp_path):
    path = tmp_path / "nvidia_test_1.json"
    result = invoke(*SHAPES, "--formats", "uint4:g128", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{path}: 4 measured, 0 known before\n"
        "4 configurations skipped: does not compile: ValueError: no room\n"
    )
    line = "uint4:g128 256x64, 7 rows: 5.0 µs, triton 8x64, 1 splits, 2 warps, 3 stages, scaling"
    assert f"{line} the accumulator (untuned 5.0 µs)\n" in result.stderr
    assert "4/4" in result.stderr
    assert len(tables.read(OPERATION, path, "NVIDIA Test 1").entries) == 4

    more = ("--formats", "uint4:g128,int8", "--output", tmp_path)
    result = invoke(*SHAPES, *more)
    assert result.stdout.startswith(f"{path}: 4 measured, 4 known before\n")
    assert "5.0 µs, triton 8x64, 1 splits, 2 warps, 3 stages, scaling the accumulator (known)" in (
        result.stderr
    )
    assert len(gpu) == 8
    assert invoke(*SHAPES, *more, "--again").stdout.startswith(f"{path}: 8 measured, 0 known")


def test_a_model_is_tuned_for_all_rows_in_the_own_folder(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    result = invoke("--model", "qwen3-8b", "--formats", "uint4:g128")
    assert result.exit_code == 0, result.output
    assert {(job.channels, job.outputs) for job in gpu} == set(tune.model_shapes("qwen3-8b"))
    assert {job.rows for job in gpu} == set(BUCKETS)
    assert (tmp_path / "nvidia_test_1.json").is_file()


def test_attention_is_tuned_into_the_same_table(gpu, tmp_path, monkeypatch):
    invoke("--shapes", "256x64", "--rows", "1", "--output", tmp_path)
    arguments = ("--attention", "b2-h4/2-d64-c4096", "--kv-formats", "KV8,KV2")
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    path = tmp_path / "nvidia_test_1.json"
    assert result.stdout.startswith(f"{path}: 2 measured, 0 known before\n")
    assert "KV8 b2-h4/2-d64-c4096: 5.0 µs, triton 8x64, " in result.stderr
    found = tables.read(attention_plans.OPERATION, path, KIND).entries
    assert {key.format for key in found} == {"KV8", "KV2"}
    assert len(tables.read(OPERATION, path, KIND).entries) == 2
    again = invoke(*arguments, "--output", tmp_path)
    assert again.stdout == f"{path}: 0 measured, 2 known before\n"


@pytest.mark.parametrize(("rows", "count"), [((), 14), (("--rows", "1,13,16"), 2)])
def test_experts_are_tuned_into_the_same_table(rows, count, gpu, tmp_path, monkeypatch):
    arguments = ("--experts", "mixtral-8x7b.down", "--formats", "uint4:g128", *rows)
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    path = tmp_path / "nvidia_test_1.json"
    assert result.stdout.startswith(f"{path}: {count} measured, 0 known before\n")
    assert "uint4:g128 mixtral-8x7b.down, 16 tokens: 5.0 µs, triton " in result.stderr
    found = tables.read(experts_plans.OPERATION, path, KIND).entries
    assert len(found) == count
    assert {key.experts for key in found} == {8}


def test_interrupted_it_leaves_a_table(gpu, tmp_path, monkeypatch):
    measure = tune.try_job

    def stop_at_the_third(job, plans):
        if len(gpu) == 2:
            raise KeyboardInterrupt
        return measure(job, plans)

    monkeypatch.setattr(tune, "try_job", stop_at_the_third)
    result = invoke(*SHAPES, "--output", tmp_path)
    assert result.exit_code == 130
    assert "goes on from here" in result.stderr
    assert (
        len(tables.read(OPERATION, tmp_path / "nvidia_test_1.json", "NVIDIA Test 1").entries) == 2
    )


def test_a_product_that_nothing_does_is_a_failure(gpu, tmp_path, monkeypatch):
    def fail(job, plans):
        return [Trial(plan, problem="wrong") for plan in plans]

    monkeypatch.setattr(tune, "try_job", fail)
    result = invoke("--shapes", "256x64", "--rows", "1", "--output", tmp_path)
    assert result.exit_code == 1
    assert "configurations skipped: wrong\n" in result.stdout
    assert "uint4:g128 256x64, 7 rows: no configuration worked\n" in result.stderr
    assert result.stderr.endswith(
        "mpjax: no configuration worked for 2 of 2 jobs: the lines above give the reasons\n"
    )


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "the default device is 'cpu'")
    result = invoke(*SHAPES, "--output", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "mpjax: tuning measures a CUDA GPU of compute capability 8.0 or newer: the default device "
        "is 'cpu'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shapes", "96x64"], "96 input channels"),
        (["--shapes", "256x64", "--formats", "bfloat16"], "is not packed"),
        (["--model", "qwen9-8b"], "does not exist"),
    ],
)
def test_what_can_not_be_tuned(gpu, arguments, reason):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert gpu == []
