"""Tables of measured plans: their folders, and how they are read, looked up and written.

A table is a JSON file for one kind of GPU, such as `nvidia_h200.json`, made by `mpjax tune`, with a
section for each operation. An entry of a user's own table overrides the entry for the same key in
the table that ships with the project.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Generic, TypeVar

from mpjax.kernels import files
from mpjax.kernels.plans.plan import Entry, Plan

SHIPPED = Path(__file__).parents[1] / "tuned"
VARIABLE = "MPJAX_TUNED"
OPERATIONS = ("gemm", "attention", "experts", "sums")  # the operations that have a section

Problem = TypeVar("Problem")


class TableError(ValueError):
    """A damaged table; the message names the file, the place in it and the reason."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The plans of one operation in a file.

    device: the kind of GPU as JAX names it, such as `NVIDIA H200`.
    stamps: the commits, versions and drivers that plans were measured with, without repetition.
    entries: the measured plans by the operation's keys, tuples that can be sorted.
    others: the sections of other operations, as they are in the file.
    """

    device: str
    stamps: tuple[Mapping[str, Any], ...] = ()
    entries: Mapping[Any, Entry] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def file_name(device: str) -> str:
    """The name of a device's table: `nvidia_h200.json` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def own_folder() -> Path | None:
    """The folder of the user's own tables, or None if MPJAX_TUNED is empty.

    This is the folder that MPJAX_TUNED names, else `mpjax/tuned` in XDG_CACHE_HOME or `~/.cache`.
    With an empty MPJAX_TUNED no tables are used, not even those that ship with the project.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "mpjax", "tuned")


_generation = 0


def generation() -> tuple[int, Path | None]:
    """A value that changes whenever lookups may find other tables: after `forget`, or by folder."""
    return _generation, own_folder()


def forget() -> None:
    """Makes the next lookup read the files again; compiled programs keep their plans."""
    global _generation
    _generation += 1
    _read_once.cache_clear()


class Tables(abc.ABC, Generic[Problem]):
    """The measured plans of one operation in all tables, and their form in a file.

    operation: its name, which is also the name of its section.
    levels: the depth of nested objects in the section. Their names, from outside in, are a key.
    configs: from the names of implementations to the dataclass of their configurations, or None.
    """

    operation: str
    levels: int
    configs: Mapping[str, type | None]

    @abc.abstractmethod
    def key_of(self, problem: Problem) -> Any:
        """The key of a problem; similar problems, which share a plan, have the same key."""

    @abc.abstractmethod
    def names(self, key: Any) -> tuple[str, ...]:
        """The names of a key in a file, one for each level."""

    @abc.abstractmethod
    def key(self, names: tuple[str, ...]) -> Any:
        """The inverse of `names`; raises ValueError for names that are not a key's."""

    @abc.abstractmethod
    def check(self, key: Any, implementation: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError for a configuration that its kernel can't run with.

        config: the fields of the configuration, as they are in the file.
        """

    def suits(self, problem: Problem, plan: Plan) -> bool:
        """Whether a problem can run with a plan that was measured for its key."""
        return True

    def find(self, table: Table, key: Any) -> Entry | None:
        """The entry of a table that a key's problems use, or None."""
        return table.entries.get(key)

    def look_up(
        self, device: str, key: Any, suits: Callable[[Plan], bool] = lambda plan: True
    ) -> Entry | None:
        """The measured plan of a key on a kind of device, or None.

        suits: tells whether a plan can be used; else the next table is asked. Raises TableError for
        a damaged table.
        """
        for _, table in self.in_use(device):
            entry = self.find(table, key)
            if entry is not None and suits(entry.plan):
                return entry
        return None

    def in_use(self, device: str) -> list[tuple[Path, Table]]:
        """The paths and tables for a kind of device, in the order in which they are looked up.

        Each file is read once in a process. Raises TableError for a damaged one.
        """
        own = own_folder()
        if own is None:
            return []
        paths = [folder / file_name(device) for folder in dict.fromkeys((own, SHIPPED))]
        found = [(path, _read_once(self, path, device)) for path in paths]
        return [(path, table) for path, table in found if table is not None]

    def record(
        self, path: Path, device: str, entries: Mapping[Any, Entry], stamp: Mapping[str, Any]
    ) -> None:
        """Adds entries to a file; they replace entries of the same keys, and all others are kept.

        The file is replaced atomically, so that an interrupted process leaves the old or the new
        one. Raises TableError if the old file is damaged.
        """
        table = self.read(path, device) if os.path.lexists(path) else Table(device)
        stamps = table.stamps if stamp in table.stamps else (*table.stamps, stamp)
        entries = {**table.entries, **entries}
        self.write(path, dataclasses.replace(table, stamps=stamps, entries=entries))
        forget()

    def write(self, path: Path, table: Table) -> None:
        """Writes a table as sorted JSON, with a line for each entry."""
        section: dict[str, Any] = {}
        for key, entry in sorted(table.entries.items()):
            *outer, last = self.names(key)
            plans = section
            for name in outer:
                plans = plans.setdefault(name, {})
            config = {} if entry.plan.config is None else dataclasses.asdict(entry.plan.config)
            config = {name: value for name, value in config.items() if value is not None}
            fields = {"implementation": entry.plan.implementation, **config}
            plans[last] = {**fields, "microseconds": round(entry.microseconds, 2)}
        sections = {**table.others, self.operation: section}
        sections = {name: sections[name] for name in OPERATIONS if name in sections}
        content = {"device": table.device, **sections, "stamps": list(table.stamps)}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(_to_json(content) + "\n", encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def read(self, path: Path, device: str) -> Table:
        """Reads the table in a file, which must be for `device`.

        Raises TableError, which names the file, what is wrong in it, and what to do.
        """
        try:
            return self._parse(files.read_object(path, ValueError), device)
        except ValueError as error:
            reason = str(error).replace(str(path), "it")
            raise TableError(
                f"the tuning table {path} can't be used: {reason}; mend it, or delete it and run "
                "`mpjax tune` again"
            ) from error

    def _parse(self, content: Any, device: str) -> Table:
        _require_fields(content, {"device", "stamps"}, "the file", set(OPERATIONS))
        if content["device"] != device:
            raise ValueError(f"it is for the device {content['device']!r}, expected {device!r}")
        stamps = content["stamps"]
        if not isinstance(stamps, list) or not all(isinstance(stamp, dict) for stamp in stamps):
            raise ValueError("stamps must be a list of objects")
        section = content.get(self.operation, {})
        entries = dict(self._entries(section, ()))
        others = {
            name: content[name] for name in OPERATIONS if name in content and name != self.operation
        }
        return Table(device, tuple(stamps), entries, others)

    def _entries(self, value: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, Entry]]:
        """The keys and entries in `value`, the object at `names` in the section."""
        where = " ".join(names) or self.operation
        if len(names) == self.levels:
            key = self.key(names)
            yield key, self._entry(key, value, where)
            return
        for name, inner in _objects(value, where):
            yield from self._entries(inner, (*names, name))

    def _entry(self, key: Any, fields: Any, where: str) -> Entry:
        implementation: Any = dict(_objects(fields, where)).get("implementation")
        if implementation not in self.configs:
            names = tuple(self.configs)
            raise ValueError(
                f"{where}: implementation is {implementation!r}, expected one of {names}"
            )
        common = {"implementation", "microseconds"}
        kind = self.configs[implementation]
        known: Any = dataclasses.fields(kind) if kind else ()
        required = {field.name for field in known if field.default is dataclasses.MISSING}
        _require_fields(fields, common | required, where, {field.name for field in known})
        microseconds = fields["microseconds"]
        if type(microseconds) not in (int, float) or not 0 < microseconds < float("inf"):
            raise ValueError(
                f"{where}: microseconds is {microseconds!r}, expected a positive number"
            )
        if kind is None:
            return Entry(Plan(implementation), microseconds)
        config = {name: value for name, value in fields.items() if name not in common}
        try:
            self.check(key, implementation, config)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return Entry(Plan(implementation, kind(**config)), microseconds)


@functools.cache
def _read_once(tables: Tables, path: Path, device: str) -> Table | None:
    return tables.read(path, device) if os.path.lexists(path) else None


def _to_json(value: Any, indent: str = "") -> str:
    """JSON with an object or a list of plain values on one line."""
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not any(isinstance(c, dict | list) for c in children):
        return json.dumps(value, ensure_ascii=False)
    deeper = indent + "  "
    if isinstance(value, list):
        opening, lines, closing = "[", [_to_json(child, deeper) for child in value], "]"
    else:
        lines = [f"{json.dumps(name)}: {_to_json(child, deeper)}" for name, child in value.items()]
        opening, closing = "{", "}"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(lines) + f"\n{indent}{closing}"


def _objects(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {type(value).__name__}")
    return list(value.items())


def _require_fields(
    value: Any, required: set[str], where: str, optional: Set[str] = frozenset()
) -> None:
    found = {name for name, _ in _objects(value, where)}
    problems = [f"unknown field {name!r}" for name in sorted(found - required - optional)]
    problems += [f"missing field {name!r}" for name in sorted(required - found)]
    if problems:
        raise ValueError(f"{where}: {', '.join(problems)}")
