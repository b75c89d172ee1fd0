"""Texts of the commands that measured result files, from the files' rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

Row = Mapping[str, Any]


class Named(Protocol):
    """A shape of a benchmark."""

    @property
    def name(self) -> str:
        """The name of its model and its own, such as `qwen3-8b.qkv`."""


def rows_of(results: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of result files; a file without a list of rows is a row itself."""
    return [
        row for result in results for row in result.get("results", result.get("rows", [result]))
    ]


def values(rows: Iterable[Row], key: str, default: Any = None) -> str:
    """The distinct values of a column, with commas between them."""
    return ",".join(dict.fromkeys(str(row.get(key, default)) for row in rows))


def options(given: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> str:
    """The options of a command, each after a space.

    given: the value by the option's name; True is a switch, and None and False leave it out.
    usual: values that are the command's defaults, and left out too.
    """
    usual = usual or {}
    return "".join(
        f" --{name}" if value is True else f" --{name} {value}"
        for name, value in given.items()
        if value is not None and value is not False and value != usual.get(name)
    )


def models_or_shapes(rows: Sequence[Row], known: Mapping[str, Sequence[Named]]) -> str:
    """Names of the measured shapes, or a model's name for all of its shapes, with commas.

    known: the shapes of each model.
    """
    measured = list(dict.fromkeys(row["shape"] for row in rows))
    parts: list[str] = []
    for model in dict.fromkeys(name.partition(".")[0] for name in measured):
        of_model = [name for name in measured if name.partition(".")[0] == model]
        whole = [shape.name for shape in known.get(model, ())]
        parts += [model] if of_model == whole else of_model
    return ",".join(parts)
