"""Tables of text cells, in Markdown and for terminals."""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

COLUMN_WIDTH = 10  # the least width of a growing table's columns, as later cells can be longer
MINIMUM_WIDTH = 140  # of a table; in a narrower terminal, lines wrap instead of being cut off


# Column header → how to print a row's cell: a format string of the row's values, such as
# "{microseconds:.1f} µs" (empty if a value is missing or None), or a function of the row.
Row = Mapping[str, Any]
Columns = dict[str, str | Callable[[Row], str]]


def table(columns: Columns, rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """The headers and cells of a table of result rows."""
    return list(columns), [[cell(each, row) for each in columns.values()] for row in rows]


def cell(column: str | Callable[[Row], str], row: Row) -> str:
    """The text of a row's cell in a column."""
    if not isinstance(column, str):
        return column(row)
    fields = (field for _, field, _, _ in string.Formatter().parse(column) if field)
    is_known = all(row.get(re.split(r"[.\[]", field)[0]) is not None for field in fields)
    return column.format_map(row) if is_known else ""


def scaled(format: str, key: str, factor: float) -> Callable[[Row], str]:
    """A column that prints a value times a factor with a format string such as "{:.1f} ms"."""
    return lambda row: "" if row.get(key) is None else format.format(row[key] * factor)


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without its empty columns; the text ends with a line break."""
    headers, rows = _filled(headers, rows)
    table = Growing(headers, is_markdown=True)
    return "".join(map(table.add, rows))


class _Console(rich.console.Console):
    """A console that raises BrokenPipeError if the reader is gone, instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(title: str | None, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table without its empty columns to stdout, with rules if stdout is a terminal."""
    headers, rows = _filled(headers, rows)
    terminal = sys.stdout.isatty()
    table = rich.table.Table(
        title=title, title_justify="left", box=rich.box.SIMPLE_HEAD if terminal else None
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = _Console(highlight=False)
    console.width = max(console.width, MINIMUM_WIDTH)
    console.print(table)


class Growing:
    """A table that is printed row by row, while later rows are still being measured.

    headers: as many as a row has cells. is_markdown: whether the table is in Markdown; otherwise
        columns are as wide as their header, their first cell and COLUMN_WIDTH, and a longer cell
        moves those after it.
    """

    def __init__(self, headers: Sequence[str], *, is_markdown: bool = False) -> None:
        self._headers, self._is_markdown = headers, is_markdown
        self._widths: list[int] = []

    def add(self, cells: Sequence[str]) -> str:
        """The line of a row with its line break, preceded by the headers for the first row."""
        lines = [cells] if self._widths else [self._headers, cells]
        if len(lines) == 2 and self._is_markdown:
            lines.insert(1, ["---", *["---:"] * (len(cells) - 1)])
        self._widths = self._widths or [
            max(len(header), len(cell), COLUMN_WIDTH)
            for header, cell in zip(self._headers, cells, strict=True)
        ]
        return "".join(map(self._line, lines))

    def _line(self, cells: Sequence[str]) -> str:
        if self._is_markdown:
            return "| " + " | ".join(cells) + " |\n"
        first, *others = zip(cells, self._widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "  ".join(padded).rstrip() + "\n"


def _filled(
    headers: Sequence[str], rows: Iterable[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The headers and rows without the columns that are empty in all rows."""
    rows = list(rows)
    kept = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return [headers[i] for i in kept], [[row[i] for i in kept] for row in rows]
