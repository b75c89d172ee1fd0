"""The choice of a plan: from a measured table, or by the rule."""

from __future__ import annotations

from mpjax.kernels.attention.plans.configuration import AttentionConfig
from mpjax.kernels.attention.plans.problem import Problem
from mpjax.kernels.attention.plans.rule import plan_by_rule
from mpjax.kernels.attention.plans.tables import TABLES
from mpjax.kernels.plans.planner import Planner

PLANNER = Planner(TABLES, plan_by_rule)
plan_of, forced = PLANNER.plan_of, PLANNER.forced


def config_of(problem: Problem) -> AttentionConfig:
    """The configuration of a problem's plan."""
    config = plan_of(problem).config
    assert isinstance(config, AttentionConfig)
    return config
