from __future__ import annotations

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import settings

from mpjax.kernels import UnsupportedError, WeightFormat, device, matmul, quantize
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm import shapes, tables, tuning
from mpjax.kernels.gemm.config import GemmConfig, Plan, WarpgroupConfig
from mpjax.kernels.gemm.heuristic import fused_config, heuristic
from mpjax.kernels.gemm.warpgroups import warpgroup_config, why_unsound
from tests.pallas_kernels.gemm.plans import (
    EIGHT_BITS,
    FORMATS,
    H200,
    PACKED,
    any_product,
    assert_sound,
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """What `plan` looks at."""

    format: WeightFormat
    shape: tuple[int, int]


@settings(max_examples=40)
@any_product
def test_candidates_are_sound_for_any_product(rows, text, groups, outputs, limits):
    format, channels = WeightFormat.parse(text), groups * 256
    plans = tuning.candidates(rows, format, channels, outputs, limits)
    assert len(set(plans)) == len(plans) <= 40
    assert heuristic(rows, format, channels, outputs, limits) in plans
    assert plans[-1].implementation == ("xla" if text in EIGHT_BITS else "dequantize") or (
        "/float8" in text and limits.compute_capability < 8.9
    )
    for plan in plans[:-1]:
        if isinstance(plan.config, WarpgroupConfig):
            assert why_unsound(plan.config, format) is None
            continue
        assert plan.implementation == "triton"
        assert plan.config is not None
        assert_sound(plan.config, format, channels, limits)
        assert plan.config.tile_m <= max(8, 2 * rows)


@pytest.mark.parametrize("shape", [shapes.QWEN3_8B[1], shapes.LLAMA3_70B[2]], ids=lambda s: s.name)
def test_there_is_enough_to_search_for_named_shapes(shape):
    for text in FORMATS:
        for rows in (16, 128, 1024):
            plans = tuning.candidates(
                rows, WeightFormat.parse(text), shape.channels, shape.outputs, H200
            )
            assert len(plans) >= 15, f"{text}, {rows} rows"


def test_candidates_begin_with_the_rule_of_thumb_and_what_is_near_to_it():
    for limits in (H200, Limits(132, 8.0)):
        plans = tuning.candidates(64, PACKED, 4096, 24576, limits)
        assert plans[0] == heuristic(64, PACKED, 4096, 24576, limits)
        fused = [plan for plan in plans if plan.implementation == "triton"]
        assert fused[0] == Plan("triton", fused_config(64, PACKED, 4096, 24576, limits))
        few = tuning.candidates(64, PACKED, 4096, 24576, limits, most=5)
        assert len(few) == 5
        assert few[0] == plans[0]
        assert few[-1] == plans[-1] == Plan("dequantize")


def test_a_third_of_the_candidates_are_for_warpgroups():
    plans = tuning.candidates(128, PACKED, 4096, 4096, H200, most=20)
    names = [plan.implementation for plan in plans]
    assert names == ["mosaic"] * 6 + ["triton"] * 13 + ["dequantize"]
    few = tuning.candidates(15, PACKED, 4096, 4096, H200, most=20)
    assert [plan.implementation for plan in few] == ["triton"] * 13 + ["mosaic"] * 6 + [
        "dequantize"
    ]
    assert len({str(plan) for plan in few}) == 20
    names = [plan.implementation for plan in tuning.candidates(7, PACKED, 4096, 4096, H200)]
    assert "mosaic" not in names


def test_candidates_split_what_the_rule_splits_in_other_ways():
    plans = tuning.candidates(128, PACKED, 4096, 24576, H200)
    configs = [plan.config for plan in plans if isinstance(plan.config, GemmConfig)]
    assert {config.unsplit for config in configs} == {None, 16896}
    assert len({config.splits for config in configs if config.unsplit}) > 1


def test_fused_fp8_products_need_a_gpu_that_has_them(monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: 8.6)
    weight = Weight(WeightFormat.parse("float8:gK/float8"), (4096, 4096))
    assert tuning.plan(1, weight) == Plan("dequantize")
    assert tuning.candidates(1, weight.format, 4096, 4096, Limits(84, 8.6)) == [Plan("dequantize")]
    with pytest.raises(UnsupportedError, match=r"came with compute capability 8\.9"):
        tuning.configure(1, weight)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Puts a plan for 16 rows and one for 32 into a table for this device."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    kind = device.kind()
    config = GemmConfig(16, 128, 5, 8, 4)
    entries = {
        tables.key(PACKED, 4096, 6144, 16): tables.Entry(Plan("triton", config), 7.0),
        tables.key(PACKED, 4096, 6144, 32): tables.Entry(Plan("dequantize"), 7.0),
    }
    tables.record(tmp_path / tables.file_name(kind), kind, entries, {})
    yield config
    tables.forget()


def test_a_measured_plan_goes_before_the_heuristic(table):
    weight = Weight(PACKED, (4096, 6144))
    assert tuning.plan(9, weight) == tuning.plan(16, weight) == Plan("triton", table)
    assert tuning.configure(9, weight) == table
    assert tuning.plan(17, weight) == Plan("dequantize")
    # The fused kernels can still be forced, and then need a configuration.
    here = device.limits()
    expected = warpgroup_config(17, PACKED, 4096, 6144, here)
    assert tuning.configure_warpgroups(17, weight) == expected
    assert tuning.configure(17, weight) == fused_config(17, PACKED, 4096, 6144, here)
    for rows, other in [(33, weight), (1, Weight(PACKED, (4096, 6145)))]:
        assert tuning.plan(rows, other) == heuristic(rows, PACKED, *other.shape, here)


def test_a_measured_plan_of_warpgroups_goes_before_the_model(table, tmp_path):
    kind, config = device.kind(), WarpgroupConfig(48, 2, 3)
    entry = tables.Entry(Plan("mosaic", config), 7.0)
    key = tables.key(PACKED, 4096, 6144, 64)
    tables.record(tmp_path / tables.file_name(kind), kind, {key: entry}, {})
    weight, here = Weight(PACKED, (4096, 6144)), device.limits()
    assert tuning.plan(40, weight) == entry.plan
    assert tuning.configure_warpgroups(40, weight) == config
    assert config != warpgroup_config(40, PACKED, 4096, 6144, here)
    assert tuning.configure(40, weight) == fused_config(40, PACKED, 4096, 6144, here)


def test_a_forced_plan_goes_before_everything(table):
    weight, plan = Weight(PACKED, (4096, 6144)), Plan("triton", GemmConfig(32, 32, 1, 1, 2))
    with tuning.forced(plan):
        assert tuning.plan(9, weight) == plan
        assert tuning.configure(9, weight) == plan.config
        with tuning.forced(Plan("dequantize")):
            assert tuning.plan(9, weight) == Plan("dequantize")
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(tuning.plan, 9, weight).result() == Plan("triton", table)
        assert tuning.plan(9, weight) == plan
    assert tuning.plan(9, weight) == Plan("triton", table)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_products_that_are_traced_follow_a_forced_plan():
    x, w = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 32), jnp.bfloat16)
    weight = quantize(w, WeightFormat.parse("float8:gK/float8"))

    def multiplies_bytes(plan):
        with tuning.forced(plan):
            text = jax.jit(lambda x, weight: matmul(x, weight)).lower(x, weight).as_text()
        [product] = [line for line in text.splitlines() if "dot_general" in line]
        return "f8E4M3FN" in product

    plans = [Plan("xla"), Plan("dequantize"), Plan("xla")]  # the second is the reference on a CPU
    assert [multiplies_bytes(plan) for plan in plans] == [True, False, True]


def test_plans_depend_on_what_is_forced_and_on_the_tables(tmp_path, monkeypatch):
    seen = [tuning.conditions()]
    with tuning.forced(Plan("dequantize")):
        seen.append(tuning.conditions())
    assert tuning.conditions() == seen[0]
    tables.forget()
    seen.append(tuning.conditions())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    seen.append(tuning.conditions())
    assert len(set(seen)) == 4


def test_what_runs_by_warpgroups_on_this_device(pretend_gpu):
    for text, rows, outputs, expected in (
        *(("uint4:g128", 7, 128, False), ("uint4:g128", 8, 128, True)),
        *(("table4:g64", 1, 128, True), ("uint4:g128", 8, 100, False)),
        *(("liquid4:g64/int8", 32, 128, False), ("liquid4:g64/int8", 33, 128, True)),
    ):
        weight = Weight(WeightFormat.parse(text), (512, outputs))
        assert tuning.runs_by_warpgroups(rows, weight) == expected, (text, rows, outputs)


def test_nothing_runs_by_warpgroups_without_a_gpu():
    assert not tuning.runs_by_warpgroups(16, Weight(PACKED, (512, 128)))


def test_tables_of_less_than_eight_rows_are_tuned_for_warpgroups():
    format = WeightFormat.parse("table4:g64")
    plans = tuning.candidates(7, format, 4096, 4096, H200)
    assert plans[0].implementation == "mosaic"
