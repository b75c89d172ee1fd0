from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import KVFormat
from mpjax.kernels.attention.plans.configuration import AttentionConfig
from mpjax.kernels.attention.plans.tables import TABLES, Key, bucket
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
    assert TABLES.key_of(shape) == KEY
    varlen = dataclasses.replace(shape, is_varlen=True)
    assert TABLES.key_of(varlen) == KEY._replace(is_varlen=True)
    assert KEY.problem(H200) == problem(batch=16, tokens=4096)
    assert KEY.problem(H200).cache.format == KVFormat.parse("KV8")


@pytest.mark.parametrize("key", [KEY, KEY._replace(is_varlen=True, rows=20, tokens=40960)])
def test_names_of_keys(key):
    assert TABLES.key(TABLES.names(key)) == key


def test_a_table_is_text_that_people_can_read_and_compare(tmp_path):
    path = tmp_path / "table.json"
    TABLES.write(path, Table(DEVICE, (), {KEY: ENTRY}))
    assert path.read_text() == TEXT
    assert TABLES.read(path, DEVICE).entries == {KEY: ENTRY}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"KV8"', '"KV9"', "KV9"),
        ('"KV8"', '"kv8"', "the format is written KV8 in a table"),
        ('"8x128"', '"8"', "'8' is not KV heads x head dim, such as 8x128"),
        ('"4": {', '"four": {', "'four' is not a number of rows"),
        ('"4": {', '"9": {', "9 is no bucket, expected 10"),
        ("16x4096", "16", "'16' is not batch x tokens"),
        ("16x4096", "17x4096", "17 is no bucket, expected 20"),
        ('"triton"', '"cudnn"', "implementation is 'cudnn'"),
        ('"warps": 4', '"warps": 3', "warps is 3, expected a power of two from 1 to 8"),
        ('"warps": 4', '"warps": 4.0', "warps is 4.0, expected an integer from 1 on"),
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
        TABLES.read(path, DEVICE)
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
    assert TABLES.suits(shape, Plan("triton", config)) == suits


def test_shipped_plans_can_run():
    for path in sorted(tables.SHIPPED.glob("*.json")):
        device = json.loads(path.read_text())["device"]
        for key, entry in TABLES.read(path, device).entries.items():
            assert TABLES.suits(key.problem(H200), entry.plan), (path.name, key)
