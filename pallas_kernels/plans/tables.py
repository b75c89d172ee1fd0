"""Tables of measured plans: their folders, and how they are read, looked up and written.

A table is a JSON file for one kind of GPU, such as `nvidia_h200.json`, made by `mpjax tune`, with a
section for each operation. An entry of a user's own table overrides the entry for the same key in
the table that ships with the project.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from mpjax.kernels import files
from mpjax.kernels.plans.names import require_values
from mpjax.kernels.plans.operation import Operation
from mpjax.kernels.plans.plan import Entry, Plan

SHIPPED = Path(__file__).parents[1] / "tuned"
VARIABLE = "MPJAX_TUNED"
OPERATIONS = ("gemm", "attention", "experts", "sums")  # the operations that have a section


class TableError(ValueError):
    """A damaged table; the message names the file, the place in it and the reason."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The plans of one operation in a file.

    device: the kind of GPU as JAX names it, such as `NVIDIA H200`.
    stamps: the commits, versions and drivers with which plans were measured, without repetition.
    entries: the measured plans by the operation's keys, tuples that can be sorted.
    others: the sections of other operations, unchanged from the file.
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


def in_use(operation: Operation[Any], device: str) -> list[tuple[Path, Table]]:
    """The paths and tables for a kind of device, in lookup order.

    Each file is read once in a process. Raises TableError for a damaged file.
    """
    own = own_folder()
    if own is None:
        return []
    paths = [folder / file_name(device) for folder in dict.fromkeys((own, SHIPPED))]
    found = [(path, _read_once(operation, path, device)) for path in paths]
    return [(path, table) for path, table in found if table is not None]


def record(
    operation: Operation[Any],
    path: Path,
    device: str,
    entries: Mapping[Any, Entry],
    stamp: Mapping[str, Any],
) -> None:
    """Adds entries to a file; they replace entries of the same keys, and all others are kept.

    The file is replaced atomically: an interrupted process leaves the old or the new file. Raises
    TableError if the old file is damaged.
    """
    table = read(operation, path, device) if os.path.lexists(path) else Table(device)
    stamps = table.stamps if stamp in table.stamps else (*table.stamps, stamp)
    entries = {**table.entries, **entries}
    write(operation, path, dataclasses.replace(table, stamps=stamps, entries=entries))
    forget()


def write(operation: Operation[Any], path: Path, table: Table) -> None:
    """Writes a table as sorted JSON, with one line for each entry."""
    section: dict[str, Any] = {}
    for key, entry in sorted(table.entries.items()):
        *outer, last = operation.names_of(key)
        plans = section
        for name in outer:
            plans = plans.setdefault(name, {})
        config = {} if entry.plan.config is None else dataclasses.asdict(entry.plan.config)
        config = {name: value for name, value in config.items() if value is not None}
        fields = {"implementation": entry.plan.implementation, **config}
        plans[last] = {**fields, "microseconds": round(entry.microseconds, 2)}
    sections = {**table.others, operation.name: section}
    sections = {name: sections[name] for name in OPERATIONS if name in sections}
    content = {"device": table.device, **sections, "stamps": list(table.stamps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(_to_json(content) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(operation: Operation[Any], path: Path, device: str) -> Table:
    """Reads an operation's table in a file, which must be for `device`.

    Raises TableError, which names the file, the fault, and what to do.
    """
    try:
        return _parse(operation, files.read_object(path, ValueError), device)
    except ValueError as error:
        reason = str(error).replace(str(path), "it")
        raise TableError(
            f"the tuning table {path} can't be used: {reason}; mend it, or delete it and run "
            "`mpjax tune` again"
        ) from error


def _parse(operation: Operation[Any], content: Any, device: str) -> Table:
    _require_fields(content, {"device", "stamps"}, "the file: ", set(OPERATIONS))
    if content["device"] != device:
        raise ValueError(f"it is for the device {content['device']!r}, expected {device!r}")
    stamps = content["stamps"]
    if not isinstance(stamps, list) or not all(isinstance(stamp, dict) for stamp in stamps):
        raise ValueError("stamps must be a list of objects")
    entries = dict(_entries(operation, content.get(operation.name, {}), ()))
    sections = [name for name in OPERATIONS if name in content and name != operation.name]
    return Table(device, tuple(stamps), entries, {name: content[name] for name in sections})


def _entries(
    operation: Operation[Any], value: Any, names: tuple[str, ...]
) -> Iterator[tuple[Any, Entry]]:
    """The keys and entries in `value`, the object at `names` in the section."""
    where = " ".join(names) or operation.name
    if len(names) == len(operation.levels):
        key = operation.key(names)
        try:
            yield key, _entry(operation, key, value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return
    for name, inner in _objects(value, f"{where}: "):
        yield from _entries(operation, inner, (*names, name))


def _entry(operation: Operation[Any], key: Any, fields: Any) -> Entry:
    implementation: Any = dict(_objects(fields)).get("implementation")
    names = tuple(operation.configs)
    if implementation not in names:
        raise ValueError(f"implementation is {implementation!r}, expected one of {names}")
    common = {"implementation", "microseconds"}
    kind = operation.configs[implementation]
    known: Any = dataclasses.fields(kind) if kind else ()
    required = {field.name for field in known if field.default is dataclasses.MISSING}
    _require_fields(fields, common | required, "", {field.name for field in known})
    microseconds = fields["microseconds"]
    if type(microseconds) not in (int, float) or not 0 < microseconds < float("inf"):
        raise ValueError(f"microseconds is {microseconds!r}, expected a positive number")
    if kind is None:
        return Entry(Plan(implementation), microseconds)
    config = {name: value for name, value in fields.items() if name not in common}
    require_values(kind, config)
    plan = Plan(implementation, kind(**config))
    if reason := operation.why_damaged(key, plan):
        raise ValueError(reason)
    return Entry(plan, microseconds)


@functools.cache
def _read_once(operation: Operation[Any], path: Path, device: str) -> Table | None:
    return read(operation, path, device) if os.path.lexists(path) else None


def _to_json(value: Any, indent: str = "") -> str:
    """JSON in which an object or a list of plain values takes one line."""
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


def _objects(value: Any, where: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}expected an object, found {type(value).__name__}")
    return list(value.items())


def _require_fields(
    value: Any, required: set[str], where: str, optional: Set[str] = frozenset()
) -> None:
    found = {name for name, _ in _objects(value, where)}
    problems = [f"unknown field {name!r}" for name in sorted(found - required - optional)]
    problems += [f"missing field {name!r}" for name in sorted(required - found)]
    if problems:
        raise ValueError(f"{where}{', '.join(problems)}")
