from __future__ import annotations

import json
import subprocess
import sys

import jax
import pytest

from mpjax import environment
from mpjax.kernels import device
from mpjax.kernels.attention import plans as attention_plans
from mpjax.kernels.gemm.plans import OPERATION, Entry, Key, Plan
from mpjax.kernels.plans import tables


def test_every_section_is_there_and_goes_through_json():
    facts = environment.collect()
    assert list(facts) == [
        *("system", "packages", "driver", "devices", "kernels"),
        *("tuning_tables", "variables"),
    ]
    assert json.loads(json.dumps(facts)) == facts


def test_a_missing_package_is_told_and_a_missing_cuda_library_left_out(monkeypatch):
    monkeypatch.setattr(environment, "REQUIRED", ("jax", "no-such-package"))
    monkeypatch.setattr(environment, "CUDA", ("numpy", "no-such-library"))
    packages = environment.collect()["packages"]
    assert list(packages) == ["mpjax", "jax", "no-such-package", "numpy"]
    assert packages["no-such-package"] == "not installed"


def test_variables_are_those_that_steer_jax(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/somewhere")
    monkeypatch.setenv("MPJAX_TUNED", "")
    monkeypatch.setenv("UNRELATED", "secret")
    assert environment.collect()["variables"]["XLA_FLAGS"] == "--xla_dump_to=/somewhere"
    assert "MPJAX_TUNED" in environment.collect()["variables"]
    assert "--xla_dump_to=/somewhere" in environment.report()
    assert "secret" not in environment.report()


NO_GPU = "no: the default device is 'cpu', and kernels need a CUDA GPU"
NO_WGMMA = "no: compute capability {} has no `wgmma`, which only 9.0 has"


@pytest.mark.parametrize(
    ("capability", "triton", "mosaic"),
    [
        (9.0, "yes: compute capability 9.0", "yes: compute capability 9.0"),
        (8.6, "yes: compute capability 8.6", NO_WGMMA.format("8.6")),
        (10.0, "yes: compute capability 10.0", NO_WGMMA.format("10.0")),
        (7.5, *["no: compute capability 7.5 is below 8.0"] * 2),
        (None, NO_GPU, NO_GPU),
    ],
)
def test_which_kernels_can_run(monkeypatch, capability, triton, mosaic):
    monkeypatch.setattr("mpjax.kernels.mosaic.launch.why_slow", lambda: None)
    with device.described_as(compute_capability=capability):
        assert environment.collect()["kernels"] == {"triton": triton, "mosaic": mosaic}


def test_a_broken_backend_is_told_and_not_raised(monkeypatch):
    def broken():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", broken)
    sentence = "could not be found out: RuntimeError: Unable to initialize backend 'cuda'"
    assert environment.collect()["devices"] == sentence
    assert sentence in environment.report()


@pytest.mark.parametrize(
    ("script", "driver"),
    [
        (
            "echo 'NVIDIA H200, 580.159.04, 143771 MiB, 9.0'",
            [
                {
                    "name": "NVIDIA H200",
                    "driver_version": "580.159.04",
                    "memory.total": "143771 MiB",
                    "compute_cap": "9.0",
                }
            ],
        ),
        ("echo 'No devices were found'; exit 6", "nvidia-smi failed: No devices were found"),
        (None, "no NVIDIA driver: nvidia-smi is not on the PATH"),
    ],
)
def test_driver(monkeypatch, tmp_path, script, driver):
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.collect()["driver"] == driver


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The file of a person's own table, for a GPU that none ships for."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    tables.forget()
    with device.described_as("NVIDIA Test"):
        yield tmp_path / "nvidia_test.json"
    tables.forget()


def test_the_tuning_tables_in_use_are_told(tuned, monkeypatch):
    untuned = environment.collect()["tuning_tables"]
    assert untuned == "none for 'NVIDIA Test': heuristics (`mpjax tune` makes a table)"

    entry = Entry(Plan("dequantize"), 1.0)
    plans = {Key("uint4:g128", 256, 64, rows): entry for rows in (16, 32)}
    tables.record(OPERATION, tuned, "NVIDIA Test", plans, {})
    key = attention_plans.Key("KV8", 8, 128, False, 4, 1, 4096)
    entry = Entry(Plan("triton", attention_plans.AttentionConfig(8, 64, 4, 4, 3)), 1.0)
    tables.record(attention_plans.OPERATION, tuned, "NVIDIA Test", {key: entry}, {})
    assert environment.collect()["tuning_tables"] == {
        str(tuned): "3 plans",
        "anything else": "heuristics",
    }
    assert f"{tuned}  3 plans" in environment.report()

    monkeypatch.setenv("MPJAX_TUNED", "")
    unused = environment.collect()["tuning_tables"]
    assert unused == "none, because MPJAX_TUNED is empty: heuristics"


def test_a_damaged_tuning_table_is_told(tuned):
    tuned.write_text("{")
    found = environment.collect()["tuning_tables"]
    assert found.startswith(f"could not be found out: TableError: the tuning table {tuned}")


def test_importing_the_module_does_not_import_jax():
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, environment.__file__], check=True)
