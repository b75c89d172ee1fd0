from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import KVLayout, PagedKVCache, Span, paged_attention
from mpjax.kernels.attention.plans.choice import config_of, forced, plan_of
from mpjax.kernels.attention.plans.configuration import AttentionConfig
from mpjax.kernels.attention.plans.rule import config_by_rule, plan_by_rule
from mpjax.kernels.attention.plans.tables import TABLES
from mpjax.kernels.gemm import plans as gemm_plans
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from tests.pallas_kernels.attention.plans.problems import H200, problem

KIND = "NVIDIA Test 1"
LIMITS = dataclasses.replace(H200, kind=KIND)
MEASURED = Plan("triton", AttentionConfig(8, 128, 24, 2, 4))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Puts a plan for one sequence of 4096 tokens into a table; gives that problem."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    one = problem(batch=1, limits=LIMITS)
    entries = {TABLES.key_of(one): Entry(MEASURED, 7.0)}
    TABLES.record(tmp_path / tables.file_name(KIND), KIND, entries, {})
    yield one
    tables.forget()


def test_a_measured_plan_goes_before_the_rule(measured):
    assert config_of(measured) == MEASURED.config
    near = dataclasses.replace(measured, tokens=3712)
    assert plan_of(near) == MEASURED
    for changes in ({"tokens": 3584}, {"batch": 2}, {"rows": 5}, {"limits": H200}):
        other = dataclasses.replace(measured, **changes)
        assert plan_of(other) == plan_by_rule(other)


def test_a_measured_plan_that_does_not_suit_the_pages_is_not_used(measured):
    small = dataclasses.replace(measured.cache, page_size=64)
    found = config_of(dataclasses.replace(measured, cache=small))
    assert found.tile_keys == 64


def test_attention_follows_a_forced_plan(lower_for_cuda, pretend_gpu):
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(KVLayout(2, 64, "KV8"), layers=1, batch=1, max_tokens=4096)
    )
    queries = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16)
    span = Span(cache.block_tables, cache.lengths, cache.lengths)

    def programs():
        return lower_for_cuda(
            lambda *arguments: paged_attention(*arguments), queries, cache.layers[0], span
        )

    one = problem("KV8", 1, 2, heads=(2, 64))
    plans = [
        Plan("triton", dataclasses.replace(config_by_rule(one), splits=splits)) for splits in (3, 5)
    ]
    for plan, splits in zip(plans, (3, 5), strict=True):
        with forced(plan):
            assert plan_of(one) == plan
            assert f"tensor<1x4x{splits}x64xf32>" in programs()


def test_products_have_their_plans_where_those_of_attention_are_forced():
    with forced(MEASURED), gemm_plans.forced(Plan("xla")):
        assert plan_of(problem()) == MEASURED
        with forced(None):
            assert plan_of(problem()) == plan_by_rule(problem())
