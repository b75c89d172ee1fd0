from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, Span, paged_attention
from mpjax.kernels.attention.plans.configuration import AttentionConfig
from mpjax.kernels.attention.plans.operation import (
    OPERATION,
    Key,
    bucket,
    config_of,
    forced,
    plan_of,
)
from mpjax.kernels.attention.plans.rule import config_by_rule, plan_by_rule
from mpjax.kernels.gemm import plans as gemm_plans
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, TableError
from tests.pallas_kernels.attention.plans.problems import H200, problem

DEVICE = "NVIDIA Test 1"
KEY = Key("KV8", 8, 128, False, 4, 16, 4096)
ENTRY = Entry(Plan("triton", AttentionConfig(8, 64, 2, 4, 3, registers=168)), 21.5)
TEXT = """\
{
  "device": "NVIDIA Test 1",
  "attention": {
    "KV8": {
      "8x128": {
        "4": {
          "16x4096": {"implementation": "triton", "tile_rows": 8, "tile_keys": 64, "splits": 2, \
"warps": 4, "stages": 3, "residual_keys": 16, "residual_splits": 0, "registers": 168, \
"is_balanced": false, "has_one_loop": false, "microseconds": 21.5}
        }
      }
    }
  },
  "stamps": []
}
"""


@given(st.integers(1, 10**7))
def test_a_bucket_is_at_most_a_quarter_larger(number):
    found = bucket(number)
    assert number <= found < 1.25 * number + 1
    assert bucket(found) == found
    assert found < 9 or bucket(found + 1) > found


def test_buckets():
    assert [bucket(n) for n in (1, 7, 8, 9, 11, 17, 4000, 4097)] == [
        1,
        7,
        8,
        10,
        12,
        20,
        4096,
        5120,
    ]


def test_keys_of_problems():
    shape = problem(batch=15, tokens=3712)
    assert OPERATION.key_of(shape) == KEY
    varlen = dataclasses.replace(shape, is_varlen=True)
    assert OPERATION.key_of(varlen) == KEY._replace(is_varlen=True)
    assert KEY.problem(H200) == problem(batch=16, tokens=4096)
    assert KEY.problem(H200).cache.format == KVFormat.parse("KV8")


@pytest.mark.parametrize("key", [KEY, KEY._replace(is_varlen=True, rows=20, tokens=40960)])
def test_names_of_keys(key):
    assert OPERATION.key(OPERATION.names_of(key)) == key


def test_a_table_is_text_that_people_can_read_and_compare(tmp_path):
    path = tmp_path / "table.json"
    tables.write(OPERATION, path, Table(DEVICE, (), {KEY: ENTRY}))
    assert path.read_text() == TEXT
    assert tables.read(OPERATION, path, DEVICE).entries == {KEY: ENTRY}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"KV8"', '"KV9"', "KV9"),
        ('"KV8"', '"kv8"', "kv8 8x128 4 16x4096: in a table this is KV8 8x128"),
        ('"8x128"', '"8"', "'8' is not of the form 'kv_headsxhead_dim'"),
        ('"4": {', '"four": {', r"'four' is not of the form '\[varlen \]rows'"),
        ('"4": {', '"9": {', "KV8 8x128 9 16x4096: in a table this is KV8 8x128 10 16x4096"),
        ("16x4096", "16", "'16' is not of the form 'batchxtokens'"),
        ("16x4096", "17x4096", "4 17x4096: in a table this is KV8 8x128 4 20x4096"),
        ('"triton"', '"cudnn"', "implementation is 'cudnn'"),
        ('"warps": 4', '"warps": 3', "warps is 3, expected a power of two from 1 to 8"),
        ('"warps": 4', '"warps": 4.0', "warps is 4.0, expected a positive integer"),
        ('"residual_splits": 0', '"residual_splits": -1', "residual_splits is -1"),
        ('"is_balanced": false', '"is_balanced": 0', "is_balanced is 0, expected true or false"),
        ('"has_one_loop": false', '"has_one_loop": true', "has_one_loop is true"),
        ('"stages": 3, ', "", "missing field 'stages'"),
    ],
)
def test_damage_is_told_with_file_and_reason(tmp_path, old, new, reason):
    path = tmp_path / "table.json"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(TableError, match=reason) as error:
        tables.read(OPERATION, path, DEVICE)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "page_size", "suits"),
    [
        ({}, 128, True),
        ({}, 32, True),  # two pages at once
        ({"tokens": 64}, 128, False),  # a tile for two programs
        ({"tile_keys": 128}, 128, True),
        ({"tile_keys": 128}, 64, False),
    ],
)
def test_plans_that_suit_a_problem_of_their_key(changes, page_size, suits):
    tile_keys, tokens = changes.get("tile_keys", 64), changes.get("tokens", 4096)
    shape = problem(batch=16, tokens=tokens)
    shape = dataclasses.replace(shape, cache=dataclasses.replace(shape.cache, page_size=page_size))
    config = dataclasses.replace(ENTRY.plan.config, tile_keys=tile_keys)
    assert OPERATION.suits(shape, Plan("triton", config)) == suits


def test_shipped_plans_can_run():
    for path in sorted(tables.SHIPPED.glob("*.json")):
        device = json.loads(path.read_text())["device"]
        for key, entry in tables.read(OPERATION, path, device).entries.items():
            assert OPERATION.suits(key.problem(H200), entry.plan), (path.name, key)


KIND = "NVIDIA Test 1"
LIMITS = dataclasses.replace(H200, kind=KIND)
MEASURED = Plan("triton", AttentionConfig(8, 128, 24, 2, 4))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Puts a plan for one sequence of 4096 tokens into a table; gives that problem."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    one = problem(batch=1, limits=LIMITS)
    entries = {OPERATION.key_of(one): Entry(MEASURED, 7.0)}
    tables.record(OPERATION, tmp_path / tables.file_name(KIND), KIND, entries, {})
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
