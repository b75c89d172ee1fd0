from __future__ import annotations

import dataclasses
import functools

import pytest

from mpjax.kernels.plans.plan import Entry, Plan


def test_equal_plans_are_one_key():
    assert len({Plan("triton", (1, 2)), Plan("triton", (1, 2)), Plan("triton")}) == 2
    assert Plan("reference").config is None


def test_a_plan_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        functools.partial(setattr, Plan("triton"), "implementation")("xla")


def test_an_entry_is_a_plan_and_its_time():
    plan, microseconds = Entry(Plan("triton"), 2.5)
    assert (plan.implementation, microseconds) == ("triton", 2.5)
