"""Tables of texts, in Markdown and for terminals."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import rich.box
import rich.console
import rich.table

MINIMUM_WIDTH = 140  # of a table; in a narrower terminal lines wrap, and no text is cut off


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without its empty columns; the text ends with a line break."""
    headers, rows = _filled(headers, rows)
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


class _Console(rich.console.Console):
    """A console that raises BrokenPipeError if the reader has gone, instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(title: str | None, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table without its empty columns to stdout, with rules if that is a terminal."""
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


def _filled(
    headers: Sequence[str], rows: Iterable[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The headers and rows without the columns that are empty in all rows."""
    rows = list(rows)
    kept = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return [headers[i] for i in kept], [[row[i] for i in kept] for row in rows]
