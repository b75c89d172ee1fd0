from __future__ import annotations

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels.gemm.plans.configuration import Implementation, TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.operation import OPERATION
from mpjax.kernels.plans.plan import Plan


def test_equal_configurations_share_a_compiled_program(trace_counter):
    double = trace_counter(lambda x, plan: 2 * x)
    compiled = jax.jit(double, static_argnums=1)
    for stages in (2, 3, 3):
        compiled(jnp.ones(3), Plan("triton", TritonConfig(16, 64, 1, 4, stages)))
    assert double.count == 2


def test_unless_told_otherwise_sums_are_scaled_and_steps_are_whole():
    config = TritonConfig(16, 64, 1, 4, 3)
    assert (config.scaling, config.width) == ("accumulator", None)
    assert Plan("dequantize").config is None


@pytest.mark.parametrize("value", [TritonConfig(16, 64, 1, 4, 3), Plan("xla")])
def test_nothing_changes_afterwards(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        functools.partial(setattr, value, dataclasses.fields(value)[0].name)(None)


def test_a_plan_is_for_a_gpu():
    """Tables name every implementation but the reference, which needs no plan."""
    assert {*OPERATION.configs, "reference"} == set(typing.get_args(Implementation))


@pytest.mark.parametrize(
    ("rows", "splits", "expected"), [(8, 2, 8), (16, 2, 8), (24, 2, 24), (32, 2, 16), (32, 4, 32)]
)
def test_programs_of_a_cluster_finish_whole_rows(rows, splits, expected):
    assert WarpgroupConfig(rows, 2, splits).finished_rows == expected


def test_sums_are_scaled_in_turn_where_registers_have_room():
    assert WarpgroupConfig(16, 4, 1).overlaps_groups(bits=4)
    assert WarpgroupConfig(16, 3, 2, 3).overlaps_groups(bits=3)
    assert not WarpgroupConfig(16, 4, 2, 2).overlaps_groups(bits=3)
    assert not WarpgroupConfig(24, 2, 1).overlaps_groups(bits=4)
