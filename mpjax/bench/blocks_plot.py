"""Plots the perplexity of W4Ax over the share of 8-bit blocks, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.bench.figures import GREY, figure_of, style_of

Rows = Sequence[Mapping[str, Any]]
ORDERS = {True: "channels sorted", False: "channels as they are"}


def draw(rows: Rows, path: Path) -> None:
    """Draws a line for each order of channels, and a horizontal line for each other precision.

    rows: the results of `benchmarks.blocks`: each with `precision` and `rise`, and for W4Ax with
    the share `wide` and whether channels are `ordered`.
    """
    with figure_of(path, (5.2, 3.4)) as figure:
        axes = figure.subplots()
        for index, (order, label) in enumerate(ORDERS.items()):
            line = [row for row in rows if row.get("ordered") is order]
            color, marker, face = style_of(index)
            shares, rises = ([100 * row[name] for row in line] for name in ("wide", "rise"))
            axes.plot(shares, rises, color=color, marker=marker, mfc=face, ms=4, label=label)
        for row in rows:
            if "wide" not in row and row["rise"] > 0:
                axes.axhline(100 * row["rise"], color=GREY, lw=0.8, ls="--")
                axes.annotate(row["precision"], (100, 100 * row["rise"]), ha="right", va="bottom")
        axes.set_xlabel("blocks in 8 bits, %")
        axes.set_ylabel("rise of perplexity, %")
        axes.legend()
