from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.gemm import tables
from mpjax.kernels.gemm.config import GemmConfig, Plan, WarpgroupConfig
from mpjax.kernels.gemm.tables import Entry, Key, Table, TableError

DEVICE = "NVIDIA Test 1"
UINT4 = WeightFormat.parse("uint4:g128")
SMALL = Key("uint4:g128", 4096, 6144, 16)
LARGE = Key("uint4:g128", 12288, 4096, 1024)
FUSED = Entry(Plan("triton", GemmConfig(16, 64, 2, 2, 3)), 7.25)
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


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a person's own tables, and none that ship."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path / "own"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    yield tmp_path / "own"
    tables.forget()


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(1, 7), (8, 8), (9, 15), (16, 16), (17, 31), (24, 32), (25, 31), (1000, 1024), (50_000, 8192)],
)
def test_buckets(rows, bucket):
    assert tables.bucket(rows) == bucket


def test_plans_of_warpgroups_come_back(tmp_path):
    path, table = tmp_path / "table.json", Table(DEVICE, (), {SMALL: OF_WARPGROUPS, LARGE: FUSED})
    tables.write(path, table)
    assert tables.read(path, DEVICE) == table


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
    tables.write(path, Table(DEVICE, (), {SMALL: OF_WARPGROUPS}))
    content = json.loads(path.read_text())
    content["gemm"]["uint4:g128"]["4096x6144"]["16"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=re.escape(reason)):
        tables.read(path, DEVICE)


def test_a_multiple_of_eight_serves_the_rows_below_it(own):
    def found(entry):
        tables.forget()
        tables.write(own / tables.file_name(DEVICE), Table(DEVICE, (), {SMALL: entry}))
        keys = [tables.key(UINT4, 4096, 6144, rows) for rows in range(8, 18)]
        return [tables.lookup(DEVICE, key) for key in keys]

    assert found(FUSED) == [None, *[FUSED] * 8, None]
    # Of other rows, x would be copied.
    assert found(OF_WARPGROUPS) == [*[None] * 8, OF_WARPGROUPS, None]


def test_symmetric_codes_have_plans_of_their_own():
    symmetric = WeightFormat.parse("uint4:g128:sym")
    assert tables.key(UINT4, 4096, 6144, 16) == SMALL
    assert tables.key(symmetric, 4096, 6144, 16) == SMALL._replace(format="uint4:g128:sym")


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "nvidia_h200.json"), ("NVIDIA RTX(TM) 4090-D", "nvidia_rtx_tm_4090_d.json")],
)
def test_file_names(device, name):
    assert tables.file_name(device) == name


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/home/her"}, "/home/her/.cache/mpjax/tuned"),
        ({"HOME": "/home/her", "XDG_CACHE_HOME": "/fast"}, "/fast/mpjax/tuned"),
        ({"HOME": "/home/her", "XDG_CACHE_HOME": ""}, "/home/her/.cache/mpjax/tuned"),
        ({"HOME": "/home/her", "MPJAX_TUNED": "~/mine"}, "/home/her/mine"),
        ({"HOME": "/home/her", "MPJAX_TUNED": ""}, None),
    ],
)
def test_where_own_tables_are(monkeypatch, variables, folder):
    for name in ("HOME", "XDG_CACHE_HOME", "MPJAX_TUNED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tables.own_folder() == (None if folder is None else Path(folder))


def test_a_table_is_text_that_people_can_read_and_compare(tmp_path):
    path = tmp_path / "new" / "table.json"
    tables.write(path, TABLE)
    assert path.read_text() == TEXT
    assert tables.read(path, DEVICE) == TABLE
    assert os.listdir(path.parent) == ["table.json"]


def test_fields_with_defaults_may_be_missing(own):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    path.write_text(json.dumps(content(scaling=None)))
    assert tables.lookup(DEVICE, SMALL) == FUSED
    entry = Entry(Plan("triton", GemmConfig(16, 64, 2, 2, 3, "weight", 32)), 7.0)
    tables.record(path, DEVICE, {SMALL: entry}, STAMP)
    assert tables.lookup(DEVICE, SMALL) == entry
    assert '"width": 32' in path.read_text()


def test_an_empty_table(tmp_path):
    path = tmp_path / "table.json"
    tables.write(path, Table(DEVICE))
    assert tables.read(path, DEVICE) == Table(DEVICE)


def test_recording_keeps_what_else_is_there(tmp_path):
    path = tmp_path / "table.json"
    tables.record(path, DEVICE, {SMALL: UNFUSED}, STAMP)
    tables.record(path, DEVICE, {LARGE: UNFUSED}, STAMP)
    newer = {"commit": "def", "jax": "0.11.2"}
    tables.record(path, DEVICE, {SMALL: FUSED}, newer)
    assert tables.read(path, DEVICE) == Table(DEVICE, (STAMP, newer), TABLE.entries)


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    tables.write(path, TABLE)

    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        tables.record(path, DEVICE, {SMALL: UNFUSED}, STAMP)
    assert os.listdir(tmp_path) == ["table.json"]
    assert path.read_text() == TEXT


def test_own_plans_go_before_shipped_ones(own):
    name = tables.file_name(DEVICE)
    assert tables.in_use(DEVICE) == []
    assert tables.lookup(DEVICE, SMALL) is None

    shipped = Table(DEVICE, (), {SMALL: UNFUSED, LARGE: UNFUSED})
    tables.write(tables.SHIPPED / name, shipped)
    tables.record(own / name, DEVICE, {SMALL: FUSED}, STAMP)
    assert [path for path, _ in tables.in_use(DEVICE)] == [own / name, tables.SHIPPED / name]
    assert tables.lookup(DEVICE, SMALL) == FUSED
    assert tables.lookup(DEVICE, LARGE) == UNFUSED
    assert tables.lookup(DEVICE, LARGE._replace(rows=2048)) is None
    assert tables.lookup("NVIDIA Test 2", SMALL) is None


def test_an_empty_variable_leaves_no_tables(own, monkeypatch):
    tables.record(own / tables.file_name(DEVICE), DEVICE, {SMALL: FUSED}, STAMP)
    monkeypatch.setenv("MPJAX_TUNED", "")
    assert tables.in_use(DEVICE) == []


def test_a_file_is_read_once(own, monkeypatch):
    tables.record(own / tables.file_name(DEVICE), DEVICE, {SMALL: FUSED}, STAMP)
    assert tables.lookup(DEVICE, SMALL) == FUSED
    monkeypatch.setattr(tables, "read", lambda *arguments: pytest.fail("read again"))
    assert tables.lookup(DEVICE, SMALL) == FUSED


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
        tables.lookup(DEVICE, SMALL)
    assert str(path) in str(error.value)
    assert "mpjax tune" in str(error.value)
    with pytest.raises(TableError, match=reason):  # and is not written over
        tables.record(path, DEVICE, {SMALL: FUSED}, STAMP)


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
        tables.lookup(DEVICE, SMALL)
    with pytest.raises(TableError, match=reason):
        tables.record(path, DEVICE, {SMALL: FUSED}, STAMP)


def test_shipped_tables_are_sound():
    for path in sorted(tables.SHIPPED.glob("*.json")):
        device = json.loads(path.read_text())["device"]
        assert path.name == tables.file_name(device)
        assert tables.read(path, device).entries
