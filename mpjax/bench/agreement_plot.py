"""Plots each precision's KL divergence and perplexity over its bits per weight, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.bench.figures import GREY, Axes, figure_of, style_of

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows, path: Path) -> None:
    """Draws KL divergence and the rise of perplexity over bits per weight, a mark for each row.

    rows: the results of `mpjax evaluate --against`. A grey line joins the Pareto frontier. A
    divergence of zero is left out of the logarithmic axis.
    """
    with figure_of(path, (7.6, 3.3 + 0.16 * (len(rows) // 4 + 1))) as figure:
        divergence, perplexity = figure.subplots(1, 2)
        _panel(divergence, rows, [row["kl_mean"] for row in rows])
        if any(row["kl_mean"] > 0 for row in rows):
            divergence.set_yscale("log")
        divergence.set_ylabel("mean KL divergence, nats")
        rises = [100 * (row["perplexity"] / row["reference_perplexity"] - 1) for row in rows]
        _panel(perplexity, rows, rises)
        perplexity.axhline(0, color="black", lw=0.8)
        perplexity.set_ylabel("rise of perplexity, %")
        handles, labels = divergence.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7.5)


def frontier(bits: Sequence[float], losses: Sequence[float]) -> list[int]:
    """The indices of the Pareto frontier (fewest bits, lowest loss), by ascending bits."""
    kept: list[int] = []
    for index in sorted(range(len(bits)), key=lambda i: (bits[i], losses[i])):
        if not kept or losses[index] < losses[kept[-1]]:
            kept.append(index)
    return kept


def _panel(axes: Axes, rows: Rows, heights: Sequence[float]) -> None:
    bits = [row["bits_per_weight"] for row in rows]
    best = frontier(bits, heights)
    axes.plot([bits[i] for i in best], [heights[i] for i in best], color=GREY, lw=0.8, zorder=1)
    for index, (row, width, height) in enumerate(zip(rows, bits, heights, strict=True)):
        color, marker, face = style_of(index)
        axes.scatter(
            *(width, height), s=22, marker=marker, color=color, fc=face, label=row["precision"]
        )
    axes.set_xlabel("bits per weight")
