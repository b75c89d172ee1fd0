"""Writes tables and plots of the saved results into the pages of the docs.

python -m benchmarks.report

Where a page has the lines `<!-- figures: NAME -->` and `<!-- end of figures -->`, what lies between
them is made from the result files of the figures NAME in `benchmarks/figures`: a table for each
file, with the command that measured it. All other text of a page is written by people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from mpjax.bench import tables

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
PLACE = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)

Result = Mapping[str, Any]  # the content of a result file
Results = Sequence[Result]


class Figures(NamedTuple):
    """A table, plots and notes made from result files for a page of the docs.

    patterns: glob patterns of the files' names.
    table: results → the headers and lines of the table.
    is_joined: whether one table has all files; else each file has a table, with its command.
    plots: draws plots of all files into a folder, and returns the caption and file name of each.
    notes: paragraphs below the table of a file.
    """

    patterns: tuple[str, ...]
    table: Callable[[Results], tuple[Sequence[str], Iterable[Sequence[str]]]]
    is_joined: bool = False
    plots: Callable[[Results, Path], Iterable[tuple[str, str]]] = lambda results, folder: ()
    notes: Callable[[Result], Iterable[str]] = lambda result: ()

    def paths(self, results: Path) -> list[Path]:
        """The result files in a folder."""
        return [path for pattern in self.patterns for path in sorted(results.glob(pattern))]


def rows_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The rows of result files; a file without a list of rows is a row itself."""
    return [
        row for result in results for row in result.get("results", result.get("rows", [result]))
    ]


def of_columns(
    columns: tables.Columns, figures: Callable[[Result], Result] = dict
) -> Callable[[Results], tuple[Sequence[str], Iterable[Sequence[str]]]]:
    """A table of these columns. figures: adds derived values to a row."""
    return lambda results: tables.table(columns, map(figures, rows_of(results)))


def main() -> None:
    """Writes the pages of this checkout, and prints the path of each."""
    for path in write(RESULTS, DOCS):
        print(path)


def write(results: Path, docs: Path) -> list[Path]:
    """Fills the figures of all pages below `docs`; returns the pages with figures.

    results: the folder of result files. Plots are drawn into the folder `benchmarks` of the docs.
    """
    from benchmarks.figures import FIGURES

    written = []
    for page in sorted(docs.rglob("*.md")):

        def fill(place: re.Match[str], page: Path = page) -> str:
            text = markdown(FIGURES[place[2]], results, docs / "benchmarks", page.parent)
            return f"{place[1]}\n{text}\n{place[3]}"

        text, count = PLACE.subn(fill, page.read_text(encoding="utf-8"))
        if count:
            page.write_text(text, encoding="utf-8")
            written.append(page)
    return written


def markdown(figures: Figures, results: Path, plots: Path, page: Path) -> str:
    """Figures as Markdown. plots: the folder of their plots. page: the folder of the page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in figures.paths(results)]
    if not found:
        raise FileNotFoundError(f"{results} has no file {' or '.join(figures.patterns)}")
    parts = [
        f"![{caption}]({relpath(plots / name, page)})\n"
        for caption, name in figures.plots(found, plots)
    ]
    if figures.is_joined:
        parts.append(tables.markdown(*figures.table(found)))
        return "\n".join(parts)
    for result in found:
        source = f"{result['device']}, jax {result['versions']['jax']}"
        parts.append(tables.markdown(*figures.table([result])))
        parts += [f"{note}\n" for note in figures.notes(result)]
        parts.append(f"`{result['command']}` · {source}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
