"""Figures of quantisation's loss of quality, and of its memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import blocks, memory, methods
from benchmarks.report import Figures, Results, of_columns, rows_of
from mpjax.bench import agreement_plot, blocks_plot
from mpjax.cli import evaluate


def _evaluate_table(results: Results) -> tuple[list[str], list[list[str]]]:
    return evaluate.table_of(rows_of(results))


def _draw_agreement(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    for result in results:
        rows = rows_of([result])
        if len({row["bits_per_weight"] for row in rows}) > 1:  # else a plot would show nothing
            name = f"agreement-{result['model'].lower()}.svg"
            agreement_plot.draw(rows, folder / name)
            yield "KL divergence and rise of perplexity over the bits of a weight", name


def _draw_blocks(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    for result in results:
        name = f"blocks-{result['model']}.svg"
        blocks_plot.draw(rows_of([result]), folder / name)
        yield f"rise of perplexity over the share of blocks in 8 bits, {result['model']}", name


FIGURES = {
    "perplexity": Figures(("perplexity*.json",), _evaluate_table),
    "agreement": Figures(("agreement*.json",), _evaluate_table, plots=_draw_agreement),
    "memory": Figures(("memory*.json",), of_columns(memory.COLUMNS)),
    "methods": Figures(("methods*.json",), of_columns(methods.COLUMNS)),
    "blocks": Figures(("blocks*.json",), of_columns(blocks.COLUMNS), plots=_draw_blocks),
}
