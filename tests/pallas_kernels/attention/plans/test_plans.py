"""Problems, configurations and tables of attention."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import KVFormat
from mpjax.kernels.attention.plans.candidates import candidates
from mpjax.kernels.attention.plans.configuration import (
    AttentionConfig,
    why_not_config,
    why_unsound,
)
from mpjax.kernels.attention.plans.operation import (
    OPERATION,
    Key,
    bucket,
)
from mpjax.kernels.attention.plans.rule import plan_by_rule
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import TableError
from tests.pallas_kernels.attention.plans.problems import H200, any_problem, problem

CONFIG = AttentionConfig(8, 64, 4, 2, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tile_rows": 4}, "tile_rows is 4, expected a power of two from 8 to 128"),
        ({"tile_keys": 96}, "tile_keys is 96"),
        ({"residual_keys": 8}, "residual_keys is 8"),
        ({"warps": 16}, "warps is 16"),
        ({"registers": 256}, "registers is 256, expected 24 to 255"),
        ({"has_one_loop": True}, "has_one_loop is true"),
    ],
)
def test_configurations_that_no_problem_can_have(changes, reason):
    found = why_not_config(dataclasses.replace(CONFIG, **changes))
    assert found == reason if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({}, {}, None),
        ({}, {"warps": 3}, "warps is 3"),
        ({}, {"tile_rows": 16}, "tiles of 16 rows for 4"),
        ({"text": "KV4cg32"}, {}, "tiles of 64 keys, where 32 share their channels' scales"),
        ({"tokens": 128}, {}, "4 programs for 2 tiles of keys"),
        ({}, {"residual_splits": 1}, "there is no residual to read"),
        ({"text": "KV2"}, {}, "programs that share packed keys leave the residual to others"),
        ({"text": "KV2"}, {"splits": 1}, None),
        ({"text": "KV2"}, {"residual_splits": 4}, None),
        ({"text": "KV2"}, {"residual_splits": 17}, "17 programs for 16 tiles of the residual"),
        ({"is_varlen": True}, {"is_balanced": True}, "programs can't help each other"),
        ({"rows": 128}, {"tile_rows": 128}, "256 registers for sums; there is room for 128"),
        ({}, {"stages": 14}, "212992 bytes of shared memory for tiles; there are 199680"),
    ],
)
def test_what_a_problem_can_run_with(options, changes, reason):
    found = why_unsound(dataclasses.replace(CONFIG, **changes), problem(**options))
    assert found == reason if reason is None else found.startswith(reason)


@settings(max_examples=15)
@any_problem
def test_they_are_sound_for_any_problem(problem):
    plans = candidates(problem)
    assert plans[0] == plan_by_rule(problem)
    assert len(set(plans)) == len(plans) <= 24
    for plan in plans:
        assert plan.implementation == "triton"
        assert why_unsound(plan.config, problem) is None
        assert OPERATION.suits(problem, plan)


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


def test_keys_of_problems():
    shape = problem(batch=15, tokens=3712)
    assert OPERATION.key_of(shape) == KEY
    varlen = dataclasses.replace(shape, is_varlen=True)
    assert OPERATION.key_of(varlen) == KEY._replace(is_varlen=True)
    assert KEY.problem(H200) == problem(batch=16, tokens=4096)
    assert KEY.problem(H200).cache.format == KVFormat.parse("KV8")


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
