"""Tables of texts, for terminals and for Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import rich.box
import rich.console
import rich.table

MINIMUM_WIDTH = 118  # in a narrow terminal lines wrap, and nothing is cut off


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, with a line break at its end; empty columns are left out."""
    headers, rows = _filled(headers, rows)
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


class _Console(rich.console.Console):
    """A console that leaves it to its caller what a reader's leaving means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(title: str | None, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table to stdout, ruled where that is a terminal; empty columns are left out."""
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
    """The columns in which some row has a text."""
    rows = list(rows)
    kept = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return [headers[i] for i in kept], [[row[i] for i in kept] for row in rows]
