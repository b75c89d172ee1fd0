from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpjax.kernels.plans import tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.tables import Table, TableError, Tables

DEVICE = "NVIDIA Test 1"
STAMP = {"commit": "abc", "jax": "0.11.2"}


@dataclasses.dataclass(frozen=True)
class Tile:
    """The configuration of the implementation `tiled`."""

    size: int
    stages: int = 2


class Sums(Tables[int]):
    """Plans of an operation that there is not: its problems are numbers."""

    operation = "sums"
    levels = 1
    configs = {"tiled": Tile, "plain": None}  # noqa: RUF012

    def key_of(self, problem: int) -> tuple[int]:
        return (problem,)

    def names(self, key: tuple[int]) -> tuple[str, ...]:
        return (f"of {key[0]}",)

    def key(self, names: tuple[str, ...]) -> tuple[int]:
        return (int(names[0].removeprefix("of ")),)

    def check(self, key: tuple[int], implementation: str, config: Any) -> None:
        if config["size"] > key[0]:
            raise ValueError(f"size is {config['size']}, more than {key[0]}")


class Others(Sums):
    operation = "others"


SUMS, OTHERS = Sums(), Others()
TILED, PLAIN = Entry(Plan("tiled", Tile(4)), 1.5), Entry(Plan("plain"), 2.0)
TABLE = Table(DEVICE, (STAMP,), {(8,): TILED, (64,): PLAIN})
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
    SUMS.write(path, TABLE)
    assert path.read_text() == TEXT
    assert SUMS.read(path, DEVICE) == TABLE
    assert os.listdir(path.parent) == ["table.json"]


def test_an_operation_keeps_the_sections_of_others(tmp_path):
    path = tmp_path / "table.json"
    SUMS.write(path, TABLE)
    OTHERS.record(path, DEVICE, {(3,): PLAIN}, STAMP)
    SUMS.record(path, DEVICE, {(9,): PLAIN}, STAMP)
    assert SUMS.read(path, DEVICE).entries == {**TABLE.entries, (9,): PLAIN}
    assert OTHERS.read(path, DEVICE).entries == {(3,): PLAIN}
    assert SUMS.read(path, DEVICE).stamps == (STAMP,)


def test_a_file_without_a_section_has_no_plans_of_it(tmp_path):
    path = tmp_path / "table.json"
    SUMS.write(path, TABLE)
    assert OTHERS.read(path, DEVICE).entries == {}


def test_recording_keeps_what_else_is_there(tmp_path):
    path, newer = tmp_path / "table.json", {"commit": "def", "jax": "0.11.2"}
    SUMS.record(path, DEVICE, {(8,): PLAIN}, STAMP)
    SUMS.record(path, DEVICE, {(64,): PLAIN}, STAMP)
    SUMS.record(path, DEVICE, {(8,): TILED}, newer)
    assert SUMS.read(path, DEVICE) == Table(DEVICE, (STAMP, newer), TABLE.entries)


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    SUMS.write(path, TABLE)

    def fail(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        SUMS.record(path, DEVICE, {(8,): PLAIN}, STAMP)
    assert os.listdir(tmp_path) == ["table.json"]
    assert path.read_text() == TEXT


def test_own_plans_go_before_shipped_ones(own):
    name = tables.file_name(DEVICE)
    assert SUMS.in_use(DEVICE) == []
    assert SUMS.look_up(DEVICE, (8,)) is None

    SUMS.write(tables.SHIPPED / name, Table(DEVICE, (), {(8,): PLAIN, (64,): PLAIN}))
    SUMS.record(own / name, DEVICE, {(8,): TILED}, STAMP)
    assert [path for path, _ in SUMS.in_use(DEVICE)] == [own / name, tables.SHIPPED / name]
    assert SUMS.look_up(DEVICE, (8,)) == TILED
    assert SUMS.look_up(DEVICE, (64,)) == PLAIN
    assert SUMS.look_up(DEVICE, (65,)) is None
    assert SUMS.look_up("NVIDIA Test 2", (8,)) is None


def test_an_empty_variable_leaves_no_tables(own, monkeypatch):
    SUMS.record(own / tables.file_name(DEVICE), DEVICE, {(8,): TILED}, STAMP)
    monkeypatch.setenv("MPJAX_TUNED", "")
    assert SUMS.in_use(DEVICE) == []


def test_a_file_is_read_once(own, monkeypatch):
    SUMS.record(own / tables.file_name(DEVICE), DEVICE, {(8,): TILED}, STAMP)
    assert SUMS.look_up(DEVICE, (8,)) == TILED
    monkeypatch.setattr(SUMS, "read", lambda *arguments: pytest.fail("read again"))
    assert SUMS.look_up(DEVICE, (8,)) == TILED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 9}, "of 8: size is 9, more than 8"),
        ({"more": 1}, "of 8: unknown field 'more'"),
        ({"implementation": "magic"}, "of 8: implementation is 'magic', expected one of"),
        ({"microseconds": 0}, "of 8: microseconds is 0, expected a positive number"),
    ],
)
def test_damage_is_told_with_file_and_reason(own, change, reason):
    path = own / tables.file_name(DEVICE)
    SUMS.write(path, TABLE)
    content = json.loads(path.read_text())
    content["sums"]["of 8"].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match=reason) as error:
        SUMS.look_up(DEVICE, (8,))
    assert str(path) in str(error.value)
    assert "mpjax tune" in str(error.value)


def test_forgetting_and_another_folder_change_what_is_read(own, monkeypatch, tmp_path):
    seen = [tables.generation()]
    tables.forget()
    seen.append(tables.generation())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    seen.append(tables.generation())
    assert len(set(seen)) == 3
