"""Tables of measured plans: where they lie, and how they are read, looked up and written.

A table is a JSON file for one kind of GPU, `nvidia_h200.json`, made by `mpjax tune`. A person's own
table goes before the one that ships with the project, plan by plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from mpjax.kernels import files
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.config import ROWS, GemmConfig, Plan, WarpgroupConfig
from mpjax.kernels.gemm.warpgroups import why_unsound

SHIPPED = Path(__file__).parents[1] / "tuned"
VARIABLE = "MPJAX_TUNED"
# A plan measured for so many rows serves all numbers of rows down to the next smaller one. Of few
# rows, multiples of ROWS have buckets of their own: others, above ROWS, are padded for warpgroups.
BUCKETS = (7, 8, 15, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

IMPLEMENTATIONS = ("triton", "mosaic", "dequantize", "xla")
CONFIGS: Mapping[str, type[GemmConfig | WarpgroupConfig]] = {
    "triton": GemmConfig,
    "mosaic": WarpgroupConfig,
}
Scaling = Literal["accumulator", "weight"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
POWERS_OF_TWO = {"tile_m", "tile_n", "warps", "width"}  # of Triton's tiles


class TableError(ValueError):
    """A table that can't be read; the message names the file, the place in it and the reason."""


class Key(NamedTuple):
    """What a plan is for: a format's text, the weight's shape [K, N], and a bucket of rows."""

    format: str
    channels: int
    outputs: int
    rows: int


class Entry(NamedTuple):
    """The fastest plan that was found, and the time of one product with it."""

    plan: Plan
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Table:
    """The plans of a file; `stamps` say what they were measured with, one for each differing run.

    device: the GPU as JAX names it, such as `NVIDIA H200`.
    """

    device: str
    stamps: tuple[Mapping[str, Any], ...] = ()
    entries: Mapping[Key, Entry] = dataclasses.field(default_factory=dict)

    def find(self, wanted: Key) -> Entry | None:
        """The plan for a key, or None.

        Without one, that of the next multiple of ROWS will do, but for one of warpgroups.
        """
        if wanted in self.entries or not wanted.rows % ROWS:
            return self.entries.get(wanted)
        other = self.entries.get(wanted._replace(rows=wanted.rows + 1))
        return None if other is None or other.plan.implementation == "mosaic" else other


def key(format: WeightFormat, channels: int, outputs: int, rows: int) -> Key:
    """Where the plan for x [rows, channels] and a weight [channels, outputs] stands in a table."""
    return Key(str(format), channels, outputs, bucket(rows))


def bucket(rows: int) -> int:
    """The smallest of BUCKETS that holds `rows`; above the last, the last."""
    size = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    return size + 1 if rows % ROWS == 0 and size % ROWS else size


def file_name(device: str) -> str:
    """The file of a device's table: `nvidia_h200.json` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def own_folder() -> Path | None:
    """Where a person's own tables are; None where MPJAX_TUNED is empty, so that none are used.

    The folder that MPJAX_TUNED names, else `mpjax/tuned` in XDG_CACHE_HOME or `~/.cache`.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "mpjax", "tuned")


def in_use(device: str) -> list[tuple[Path, Table]]:
    """The files for a device and their tables, what is looked up first coming first.

    A file is read once a process. Raises TableError for a damaged one.
    """
    own = own_folder()
    if own is None:
        return []
    paths = [folder / file_name(device) for folder in dict.fromkeys((own, SHIPPED))]
    found = [(path, _read_once(path, device)) for path in paths]
    return [(path, table) for path, table in found if table is not None]


def lookup(device: str, wanted: Key) -> Entry | None:
    """The plan measured for a key on a device, or None. Raises TableError for a damaged table."""
    for _, table in in_use(device):
        if (entry := table.find(wanted)) is not None:
            return entry
    return None


@functools.cache
def _read_once(path: Path, device: str) -> Table | None:
    return read(path, device) if os.path.lexists(path) else None


_reading = 0


def reading() -> tuple[int, Path | None]:
    """Changes when the files are read again, and with the folder of a person's own tables."""
    return _reading, own_folder()


def forget() -> None:
    """Lets the next lookup read the files again; programs compiled before stay as they are."""
    global _reading
    _reading += 1
    _read_once.cache_clear()


def record(path: Path, device: str, entries: Mapping[Key, Entry], stamp: Mapping[str, Any]) -> None:
    """Adds entries to a file, in the place of older ones, and keeps everything else in it.

    The file is replaced at once, so that an interrupted process leaves the old or the new one.
    Raises TableError where what stands there is damaged.
    """
    table = read(path, device) if os.path.lexists(path) else Table(device)
    stamps = table.stamps if stamp in table.stamps else (*table.stamps, stamp)
    write(path, Table(device, stamps, {**table.entries, **entries}))
    forget()


def write(path: Path, table: Table) -> None:
    """Writes a table as sorted JSON, a line for each plan."""
    plans: dict[str, dict[str, dict[str, Any]]] = {}
    for place, entry in sorted(table.entries.items()):
        shapes = plans.setdefault(place.format, {})
        rows = shapes.setdefault(f"{place.channels}x{place.outputs}", {})
        config = {} if entry.plan.config is None else dataclasses.asdict(entry.plan.config)
        config = {name: value for name, value in config.items() if value is not None}
        fields = {"implementation": entry.plan.implementation, **config}
        rows[str(place.rows)] = {**fields, "microseconds": round(entry.microseconds, 2)}
    content = {"device": table.device, "gemm": plans, "stamps": list(table.stamps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(_to_json(content) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


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


def read(path: Path, device: str) -> Table:
    """The table in a file, which must be that of `device`.

    Raises TableError that says what is wrong in which file, and how to get rid of it.
    """
    try:
        return _parse(files.read_object(path, ValueError), device)
    except ValueError as error:
        reason = str(error).replace(str(path), "it")
        raise TableError(
            f"the tuning table {path} can't be used: {reason}; mend it, or delete it and run "
            "`mpjax tune` again"
        ) from error


def _parse(content: Any, device: str) -> Table:
    _require_fields(content, {"device", "gemm", "stamps"}, "the file")
    if content["device"] != device:
        raise ValueError(f"it is for the device {content['device']!r}, expected {device!r}")
    stamps = content["stamps"]
    if not isinstance(stamps, list) or not all(isinstance(stamp, dict) for stamp in stamps):
        raise ValueError("stamps must be a list of objects")
    entries = {}
    for text, shapes in _objects(content["gemm"], "gemm"):
        format = WeightFormat.parse(text)
        for shape, rows in _objects(shapes, text):
            match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
            if match is None:
                raise ValueError(f"{text}: the shape {shape!r} is not KxN, such as 4096x24576")
            for bound, fields in _objects(rows, f"{text} {shape}"):
                where = f"{text} {shape} {bound}"
                if bound not in map(str, BUCKETS):
                    raise ValueError(f"{where}: rows must be one of {BUCKETS}")
                place = key(format, int(match[1]), int(match[2]), int(bound))
                if place.format != text:
                    raise ValueError(f"{where}: the format is written {place.format!r} in a table")
                entries[place] = _entry(fields, format, where)
    return Table(device, tuple(stamps), entries)


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


def _entry(fields: Any, format: WeightFormat, where: str) -> Entry:
    implementation = dict(_objects(fields, where)).get("implementation")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{where}: implementation is {implementation!r}, expected one of {IMPLEMENTATIONS}"
        )
    common = {"implementation", "microseconds"}
    kind = CONFIGS.get(implementation)
    known = dataclasses.fields(kind) if kind else ()
    required = {field.name for field in known if field.default is dataclasses.MISSING}
    _require_fields(fields, common | required, where, {field.name for field in known})
    microseconds = fields["microseconds"]
    if type(microseconds) not in (int, float) or not 0 < microseconds < float("inf"):
        raise ValueError(f"{where}: microseconds is {microseconds!r}, expected a positive number")
    if kind is None:
        return Entry(Plan(implementation), microseconds)
    config = {name: value for name, value in fields.items() if name not in common}
    _check_numbers(config, where)
    if kind is WarpgroupConfig:
        if reason := why_unsound(WarpgroupConfig(**config), format):
            raise ValueError(f"{where}: {reason}")
    else:
        _check_tiles(config, format, where)
    return Entry(Plan(implementation, kind(**config)), microseconds)


def _check_numbers(config: Mapping[str, Any], where: str) -> None:
    for name, value in config.items():
        if name == "scaling":
            if value not in SCALINGS:
                raise ValueError(f"{where}: scaling is {value!r}, expected one of {SCALINGS}")
        elif type(value) is not int or value < 1:
            raise ValueError(f"{where}: {name} is {value!r}, expected a positive integer")


def _check_tiles(config: Mapping[str, Any], format: WeightFormat, where: str) -> None:
    for name in POWERS_OF_TWO & config.keys():
        if (value := config[name]) & (value - 1):
            raise ValueError(f"{where}: {name} is {value}, expected a power of two")
    if config.get("unsplit", 0) % config.get("tile_n", 1):
        raise ValueError(f"{where}: unsplit is {config['unsplit']}, expected a multiple of tile_n")
    if format.plane_width % config.get("width", 1):
        raise ValueError(
            f"{where}: width is {config['width']}, expected a divisor of {format.plane_width}"
        )
