from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import ProductFormat, UnsupportedError, WeightFormat, device, matmul, quantize
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.operation import (
    OPERATION,
    Key,
    bucket,
    forced,
    plan_of,
    runs_by_warpgroups,
    triton_config_of,
    warpgroup_config_of,
)
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.triton_rule import triton_by_rule
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, TableError

DEVICE = "NVIDIA Test 1"
UINT4 = WeightFormat.parse("uint4:g128")
SMALL = Key("uint4:g128", 4096, 6144, 16)
FUSED = Entry(Plan("triton", TritonConfig(16, 64, 2, 2, 3)), 7.25)
STAMP = {"commit": "abc", "jax": "0.11.2"}
TEXT = """\
{
  "device": "NVIDIA Test 1",
  "gemm": {
    "uint4:g128": {
      "4096x6144": {
        "16": {"implementation": "triton", "tile_m": 16, "tile_n": 64, "splits": 2, "warps": 2, \
"stages": 3, "scaling": "accumulator", "microseconds": 7.25}
      },
      "12288x4096": {
        "1024": {"implementation": "dequantize", "microseconds": 262.0}
      }
    }
  },
  "stamps": [
    {"commit": "abc", "jax": "0.11.2"}
  ]
}
"""


OF_WARPGROUPS = Entry(Plan("mosaic", WarpgroupConfig(32, 3, 4)), 9.78)


def key(format, channels, outputs, rows):
    return OPERATION.key_of(
        Problem(rows, ProductFormat.of(format), channels, outputs, Limits(132, 9.0))
    )


def look_up(wanted):
    """The entry of a key in the tables in use."""
    found = (OPERATION.find(table.entries, wanted) for _, table in tables.in_use(OPERATION, DEVICE))
    return next((entry for entry in found if entry is not None), None)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a person's own tables, and none that ship."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path / "own"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    yield tmp_path / "own"
    tables.forget()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 7), (8, 8), (9, 15), (16, 16), (17, 31), (24, 32), (25, 31), (1000, 1024), (50_000, 8192)],
)
def test_buckets(rows, expected):
    assert bucket(rows) == expected


def test_a_multiple_of_eight_serves_the_rows_below_it(own):
    def found(entry):
        tables.forget()
        tables.write(OPERATION, own / tables.file_name(DEVICE), Table(DEVICE, (), {SMALL: entry}))
        return [look_up(key(UINT4, 4096, 6144, rows)) for rows in range(8, 18)]

    assert found(FUSED) == [None, *[FUSED] * 8, None]
    # With other numbers of rows, x would be copied.
    assert found(OF_WARPGROUPS) == [*[None] * 8, OF_WARPGROUPS, None]


def content(**changes):
    """A table with one plan, in which fields are replaced, or taken out with None."""
    fields = json.loads(TEXT)["gemm"]["uint4:g128"]["4096x6144"]["16"] | changes
    return with_plan({name: value for name, value in fields.items() if value is not None})


def with_plan(fields, format="uint4:g128", shape="4096x6144", rows="16"):
    return {"device": DEVICE, "gemm": {format: {shape: {rows: fields}}}, "stamps": []}


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (with_plan({}, format="uint5:g128"), "uint5"),
        (with_plan({}, format="uint4:g999"), "999"),
        (with_plan({}, format="int8"), "int8 4096x6144 16: in a table this is int8:gK/int8 4096x"),
        (with_plan({}, shape="4096"), "'4096' is not of the form 'channelsxoutputs'"),
        (with_plan({}, rows="17"), "4096x6144 17: in a table this is uint4:g128 4096x6144 31"),
        (content(implementation="cutlass"), "implementation is 'cutlass'"),
        (content(implementation="dequantize"), "unknown field 'scaling'"),
        (content(tile_k=64), "unknown field 'tile_k'"),
        (content(unsplit=100), "unsplit is 100, expected a multiple of tile_n"),
        (content(tile_m=None), "missing field 'tile_m'"),
        (content(tile_m=48), "tile_m is 48, expected a power of two"),
        (content(splits=0), "splits is 0, expected a positive integer"),
        (content(stages=2.0), "stages is 2.0, expected a positive integer"),
        (content(width=48), "width is 48, expected a power of two"),
        (content(width=128), "width is 128, expected a divisor of 64"),
        (content(scaling="both"), "scaling is 'both', expected one of"),
    ],
)
def test_damage_is_told_with_file_and_reason(own, damaged, reason):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    text = damaged if isinstance(damaged, str | bytes) else json.dumps(damaged)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TableError, match=reason) as error:
        look_up(SMALL)
    assert str(path) in str(error.value)
    assert "mpjax tune" in str(error.value)
    with pytest.raises(TableError, match=reason):  # and is not written over
        tables.record(OPERATION, path, DEVICE, {SMALL: FUSED}, STAMP)


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
    entries = {OPERATION.key_of(here(rows)): Entry(plan, 7.0) for rows, plan in plans.items()}
    tables.record(OPERATION, tmp_path / tables.file_name(kind), kind, entries, {})
    yield plans
    tables.forget()


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
