from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, TableError
from tests.pallas_kernels.plans.sums import OTHERS, SUMS, Key, Tile

DEVICE = "NVIDIA Test 1"
STAMP = {"commit": "abc", "jax": "0.11.2"}


TILED, PLAIN = Entry(Plan("tiled", Tile(4)), 1.5), Entry(Plan("plain"), 2.0)
TABLE = Table(DEVICE, (STAMP,), {Key(8): TILED, Key(64): PLAIN})
TEXT = """\
{
  "device": "NVIDIA Test 1",
  "sums": {
    "of 8": {"implementation": "tiled", "size": 4, "stages": 2, "microseconds": 1.5},
    "of 64": {"implementation": "plain", "microseconds": 2.0}
  },
  "stamps": [
    {"commit": "abc", "jax": "0.11.2"}
  ]
}
"""


@pytest.fixture(autouse=True)
def _operations(monkeypatch):
    monkeypatch.setattr(tables, "OPERATIONS", ("sums", "others"))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a person's own tables, and none that ship."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path / "own"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tables.forget()
    yield tmp_path / "own"
    tables.forget()


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
    tables.write(SUMS, path, TABLE)
    assert path.read_text() == TEXT
    assert tables.read(SUMS, path, DEVICE) == TABLE
    assert os.listdir(path.parent) == ["table.json"]


def test_an_operation_keeps_the_sections_of_others(tmp_path):
    path = tmp_path / "table.json"
    tables.write(SUMS, path, TABLE)
    tables.record(OTHERS, path, DEVICE, {Key(16): PLAIN}, STAMP)
    tables.record(SUMS, path, DEVICE, {Key(9): PLAIN}, STAMP)
    assert tables.read(SUMS, path, DEVICE).entries == {**TABLE.entries, Key(9): PLAIN}
    assert tables.read(OTHERS, path, DEVICE).entries == {Key(16): PLAIN}
    assert tables.read(SUMS, path, DEVICE).stamps == (STAMP,)


def test_a_file_without_a_section_has_no_plans_of_it(tmp_path):
    path = tmp_path / "table.json"
    tables.write(SUMS, path, TABLE)
    assert tables.read(OTHERS, path, DEVICE).entries == {}


def test_recording_keeps_what_else_is_there(tmp_path):
    path, newer = tmp_path / "table.json", {"commit": "def", "jax": "0.11.2"}
    tables.record(SUMS, path, DEVICE, {Key(8): PLAIN}, STAMP)
    tables.record(SUMS, path, DEVICE, {Key(64): PLAIN}, STAMP)
    tables.record(SUMS, path, DEVICE, {Key(8): TILED}, newer)
    assert tables.read(SUMS, path, DEVICE) == Table(DEVICE, (STAMP, newer), TABLE.entries)


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    tables.write(SUMS, path, TABLE)

    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        tables.record(SUMS, path, DEVICE, {Key(8): PLAIN}, STAMP)
    assert os.listdir(tmp_path) == ["table.json"]
    assert path.read_text() == TEXT


def test_own_plans_go_before_shipped_ones(own):
    name = tables.file_name(DEVICE)
    assert tables.in_use(SUMS, DEVICE) == []
    tables.write(SUMS, tables.SHIPPED / name, Table(DEVICE, (), {Key(8): PLAIN, Key(64): PLAIN}))
    tables.record(SUMS, own / name, DEVICE, {Key(8): TILED}, STAMP)
    assert [path for path, _ in tables.in_use(SUMS, DEVICE)] == [own / name, tables.SHIPPED / name]
    assert tables.in_use(SUMS, "NVIDIA Test 2") == []


def test_an_empty_variable_leaves_no_tables(own, monkeypatch):
    tables.record(SUMS, own / tables.file_name(DEVICE), DEVICE, {Key(8): TILED}, STAMP)
    monkeypatch.setenv("MPJAX_TUNED", "")
    assert tables.in_use(SUMS, DEVICE) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 9}, "of 8: size is 9, more than 8"),
        ({"size": 0}, "of 8: size is 0, expected a positive integer"),
        ({"more": 1}, "of 8: unknown field 'more'"),
        ({"implementation": []}, r"of 8: implementation is \[\], expected one of"),
        ({"implementation": "magic"}, "of 8: implementation is 'magic', expected one of"),
        ({"microseconds": 0}, "of 8: microseconds is 0, expected a positive number"),
    ],
)
def test_damage_is_told_with_file_and_reason(own, change, reason):
    path = own / tables.file_name(DEVICE)
    tables.write(SUMS, path, TABLE)
    content = json.loads(path.read_text())
    content["sums"]["of 8"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=reason) as error:
        tables.in_use(SUMS, DEVICE)
    assert str(path) in str(error.value)
    assert "mpjax tune" in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"device": ', "Expecting value"),
        (b"\xff\xfe", "it is not a text in UTF-8: byte 0 is 0xff"),
        ("[]", "can't be used: it is a JSON list: expected an object"),
        ("[" * 99_999, "it is nested deeper than 64 levels"),
        (TEXT.replace("stamps", "marks"), "the file: unknown field 'marks'"),
        (TEXT.replace("Test 1", "Test 2"), "for the device 'NVIDIA Test 2'"),
    ],
)
def test_files_that_are_no_tables(own, text, reason):
    path = own / tables.file_name(DEVICE)
    own.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TableError, match=reason):
        tables.in_use(SUMS, DEVICE)
    with pytest.raises(TableError, match=reason):  # and is not written over
        tables.record(SUMS, path, DEVICE, {}, STAMP)


def test_forgetting_and_another_folder_change_what_is_read(own, monkeypatch, tmp_path):
    seen = [tables.generation()]
    tables.forget()
    seen.append(tables.generation())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    seen.append(tables.generation())
    assert len(set(seen)) == 3
