from __future__ import annotations

import json
import os
import re

import pytest

from mpjax.kernels import ProductFormat, WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.configuration import TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.tables import TABLES, Key, bucket
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, TableError

DEVICE = "NVIDIA Test 1"
UINT4 = WeightFormat.parse("uint4:g128")
SMALL = Key("uint4:g128", 4096, 6144, 16)
LARGE = Key("uint4:g128", 12288, 4096, 1024)
FUSED = Entry(Plan("triton", TritonConfig(16, 64, 2, 2, 3)), 7.25)
UNFUSED = Entry(Plan("dequantize"), 262.0)
STAMP = {"commit": "abc", "jax": "0.11.2"}
TABLE = Table(DEVICE, (STAMP,), {LARGE: UNFUSED, SMALL: FUSED})
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
    return TABLES.key_of(
        Problem(rows, ProductFormat.of(format), channels, outputs, Limits(132, 9.0))
    )


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


def test_plans_of_warpgroups_come_back(tmp_path):
    path, table = tmp_path / "table.json", Table(DEVICE, (), {SMALL: OF_WARPGROUPS, LARGE: FUSED})
    TABLES.write(path, table)
    assert TABLES.read(path, DEVICE) == table


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_m": 20}, "20 rows in a tile of 3 warpgroups; there can be a multiple of 8, to 128"),
        ({"tile_m": 256}, "256 rows in a tile of 3 warpgroups"),
        ({"warpgroups": 5}, "5 warpgroups; there can be 2, 3, 4"),
        ({"shares": 2}, "2 of 3 warpgroups can't share outputs: no divisor"),
        ({"splits": 0}, "splits is 0, expected a positive integer"),
        ({"warps": 4}, "unknown field 'warps'"),
    ],
)
def test_damaged_plans_of_warpgroups_are_refused(change, reason, tmp_path):
    path = tmp_path / "table.json"
    TABLES.write(path, Table(DEVICE, (), {SMALL: OF_WARPGROUPS}))
    content = json.loads(path.read_text())
    content["gemm"]["uint4:g128"]["4096x6144"]["16"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=re.escape(reason)):
        TABLES.read(path, DEVICE)


def test_a_multiple_of_eight_serves_the_rows_below_it(own):
    def found(entry):
        tables.forget()
        TABLES.write(own / tables.file_name(DEVICE), Table(DEVICE, (), {SMALL: entry}))
        keys = [key(UINT4, 4096, 6144, rows) for rows in range(8, 18)]
        return [TABLES.look_up(DEVICE, wanted) for wanted in keys]

    assert found(FUSED) == [None, *[FUSED] * 8, None]
    # With other numbers of rows, x would be copied.
    assert found(OF_WARPGROUPS) == [*[None] * 8, OF_WARPGROUPS, None]


def test_symmetric_codes_have_plans_of_their_own():
    symmetric = WeightFormat.parse("uint4:g128:sym")
    assert key(UINT4, 4096, 6144, 16) == SMALL
    assert key(symmetric, 4096, 6144, 16) == SMALL._replace(format="uint4:g128:sym")


def test_a_table_is_text_that_people_can_read_and_compare(tmp_path):
    path = tmp_path / "new" / "table.json"
    TABLES.write(path, TABLE)
    assert path.read_text() == TEXT
    assert TABLES.read(path, DEVICE) == TABLE
    assert os.listdir(path.parent) == ["table.json"]


def test_fields_with_defaults_may_be_missing(own):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    path.write_text(json.dumps(content(scaling=None)))
    assert TABLES.look_up(DEVICE, SMALL) == FUSED
    entry = Entry(Plan("triton", TritonConfig(16, 64, 2, 2, 3, "weight", 32)), 7.0)
    TABLES.record(path, DEVICE, {SMALL: entry}, STAMP)
    assert TABLES.look_up(DEVICE, SMALL) == entry
    assert '"width": 32' in path.read_text()


def test_an_empty_table(tmp_path):
    path = tmp_path / "table.json"
    TABLES.write(path, Table(DEVICE))
    assert TABLES.read(path, DEVICE) == Table(DEVICE)


def test_recording_keeps_what_else_is_there(tmp_path):
    path = tmp_path / "table.json"
    TABLES.record(path, DEVICE, {SMALL: UNFUSED}, STAMP)
    TABLES.record(path, DEVICE, {LARGE: UNFUSED}, STAMP)
    newer = {"commit": "def", "jax": "0.11.2"}
    TABLES.record(path, DEVICE, {SMALL: FUSED}, newer)
    assert TABLES.read(path, DEVICE) == Table(DEVICE, (STAMP, newer), TABLE.entries)


def content(**changes):
    """A table with one plan, in which fields are replaced, or taken out with None."""
    fields = json.loads(TEXT)["gemm"]["uint4:g128"]["4096x6144"]["16"] | changes
    return with_plan({name: value for name, value in fields.items() if value is not None})


def with_plan(fields, format="uint4:g128", shape="4096x6144", rows="16"):
    return {"device": DEVICE, "gemm": {format: {shape: {rows: fields}}}, "stamps": []}


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        ('{"device": ', "Expecting value"),
        (b"\xff\xfe", "it is not a text in UTF-8: byte 0 is 0xff"),
        ([], "can't be used: it is a JSON list: expected an object"),
        ("[" * 99_999, "it is nested deeper than 64 levels"),
        ({"device": DEVICE, "gemm": {}}, "the file: missing field 'stamps'"),
        (json.loads(TEXT) | {"more": 1}, "the file: unknown field 'more'"),
        (json.loads(TEXT) | {"device": "NVIDIA Test 2"}, "for the device 'NVIDIA Test 2'"),
        (json.loads(TEXT) | {"stamps": 3}, "stamps must be a list"),
        (json.loads(TEXT) | {"gemm": []}, "gemm: expected an object, found list"),
        (with_plan({}, format="uint5:g128"), "uint5"),
        (with_plan({}, format="uint4:g999"), "999"),
        (with_plan({}, format="int8"), "the format is written .int8:gK/int8. in a table"),
        (with_plan({}, shape="4096"), "the shape '4096' is not KxN"),
        (with_plan({}, rows="17"), "uint4:g128 4096x6144 17: rows must be one of"),
        (with_plan([]), "uint4:g128 4096x6144 16: expected an object, found list"),
        (with_plan({}), "implementation is None, expected one of"),
        (content(implementation="cutlass"), "implementation is 'cutlass'"),
        (content(implementation="reference"), "implementation is 'reference'"),
        (content(implementation="dequantize"), "unknown field 'scaling'"),
        (content(tile_k=64), "unknown field 'tile_k'"),
        (content(unsplit=100), "unsplit is 100, expected a multiple of tile_n"),
        (content(tile_m=None), "missing field 'tile_m'"),
        (content(tile_m=48), "tile_m is 48, expected a power of two"),
        (content(warps=True), "warps is True, expected a positive integer"),
        (content(splits=0), "splits is 0, expected a positive integer"),
        (content(stages=2.0), "stages is 2.0, expected a positive integer"),
        (content(width=48), "width is 48, expected a power of two"),
        (content(width=128), "width is 128, expected a divisor of 64"),
        (content(scaling="both"), "scaling is 'both', expected one of"),
        (content(microseconds=-1), "microseconds is -1, expected a positive number"),
        (content(microseconds="7"), "microseconds is '7', expected a positive number"),
        (content(microseconds=float("nan")), "microseconds is nan"),
    ],
)
def test_damage_is_told_with_file_and_reason(own, damaged, reason):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    text = damaged if isinstance(damaged, str | bytes) else json.dumps(damaged)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TableError, match=reason) as error:
        TABLES.look_up(DEVICE, SMALL)
    assert str(path) in str(error.value)
    assert "mpjax tune" in str(error.value)
    with pytest.raises(TableError, match=reason):  # and is not written over
        TABLES.record(path, DEVICE, {SMALL: FUSED}, STAMP)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is a named pipe: expected a regular file"),
        (os.mkdir, "it is a folder: expected a regular file"),
        (lambda path: path.symlink_to(path), "it can't be read: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("gone"), "it is a link to gone, which does not exist"),
    ],
)
def test_what_is_no_file_is_no_table(own, make, reason):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    make(path)
    with pytest.raises(TableError, match=reason):
        TABLES.look_up(DEVICE, SMALL)
    with pytest.raises(TableError, match=reason):
        TABLES.record(path, DEVICE, {SMALL: FUSED}, STAMP)


def test_the_shipped_tables_have_plans():
    shipped = sorted(tables.SHIPPED.glob("*.json"))
    assert shipped
    for path in shipped:
        device = json.loads(path.read_text())["device"]
        assert path.name == tables.file_name(device)
        assert TABLES.read(path, device).entries
