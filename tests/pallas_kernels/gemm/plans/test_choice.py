from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import ProductFormat, UnsupportedError, WeightFormat, device, matmul, quantize
from mpjax.kernels.gemm.plans.choice import (
    forced,
    plan_of,
    runs_by_warpgroups,
    triton_config_of,
    warpgroup_config_of,
)
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule
from mpjax.kernels.gemm.plans.tables import TABLES
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan


def here(rows: int, channels: int = 4096, outputs: int = 6144, text: str = "uint4:g128") -> Problem:
    """A problem on this device."""
    return Problem(rows, ProductFormat.of(text), channels, outputs, device.limits())


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Puts a plan for 16 rows, one for 32 and one of warpgroups into a table for this device."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    kind = device.kind()
    plans = {
        16: Plan("triton", TritonConfig(16, 128, 5, 8, 4)),
        32: Plan("dequantize"),
        64: Plan("mosaic", WarpgroupConfig(48, 2, 3)),
    }
    entries = {TABLES.key_of(here(rows)): Entry(plan, 7.0) for rows, plan in plans.items()}
    TABLES.record(tmp_path / tables.file_name(kind), kind, entries, {})
    yield plans
    tables.forget()


def test_a_measured_plan_goes_before_the_rule(measured):
    assert plan_of(here(9)) == plan_of(here(16)) == measured[16]
    assert triton_config_of(here(9)) == measured[16].config
    for problem in (here(65), here(1, 4096, 6145)):
        assert plan_of(problem) == plan_by_rule(problem)


def test_a_kernel_that_is_forced_has_a_configuration_all_the_same(measured):
    problem = here(17)
    assert plan_of(problem) == Plan("dequantize")
    assert warpgroup_config_of(problem) == warpgroups_by_rule(problem)
    assert triton_config_of(problem) == triton_by_rule(problem)


def test_a_measured_plan_of_warpgroups_goes_before_the_cost_model(measured):
    problem = here(40)
    assert plan_of(problem) == measured[64]
    assert warpgroup_config_of(problem) == measured[64].config
    assert measured[64].config != warpgroups_by_rule(problem)
    assert triton_config_of(problem) == triton_by_rule(problem)


def test_a_table_is_for_its_own_kind_of_gpu(measured):
    problem = here(16)
    other = dataclasses.replace(problem.limits, kind="NVIDIA Other")
    for limits in (other, dataclasses.replace(problem.limits, kind=None)):
        elsewhere = dataclasses.replace(problem, limits=limits)
        assert plan_of(elsewhere) == plan_by_rule(problem)


def test_fused_fp8_products_need_a_gpu_that_has_them():
    with device.described_as("some GPU", compute_capability=8.6):
        problem = here(1, 4096, 4096, "float8:gK/float8")
        assert plan_of(problem) == Plan("dequantize")
        with pytest.raises(UnsupportedError, match=r"came with compute capability 8\.9"):
            triton_config_of(problem)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_products_that_are_traced_follow_a_forced_plan():
    x, w = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 32), jnp.bfloat16)
    weight = quantize(w, WeightFormat.parse("float8:gK/float8"))

    def multiplies_bytes(plan):
        with forced(plan):
            text = jax.jit(lambda x, weight: matmul(x, weight)).lower(x, weight).as_text()
        [product] = [line for line in text.splitlines() if "dot_general" in line]
        return "f8E4M3FN" in product

    plans = [Plan("xla"), Plan("dequantize"), Plan("xla")]  # the second is the reference on a CPU
    assert [multiplies_bytes(plan) for plan in plans] == [True, False, True]


def test_what_runs_by_warpgroups_on_this_device(pretend_gpu):
    for text, rows, outputs, expected in (
        *(("uint4:g128", 7, 128, False), ("uint4:g128", 8, 128, True)),
        *(("table4:g64", 1, 128, True), ("uint4:g128", 8, 100, False)),
        *(("liquid4:g64/int8", 32, 128, False), ("liquid4:g64/int8", 33, 128, True)),
    ):
        found = runs_by_warpgroups(here(rows, 512, outputs, text))
        assert found == expected, (text, rows, outputs)


def test_nothing_runs_by_warpgroups_without_a_gpu():
    assert not runs_by_warpgroups(here(16, 512, 128))
