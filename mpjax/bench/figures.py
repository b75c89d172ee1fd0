"""The style of plots, and their output as SVG (`pip install matplotlib`).

Equal figures give byte-identical files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install matplotlib") from error

__all__ = ["COLORS", "GREY", "MARKERS", "SETTINGS", "Axes", "figure_of", "style_of"]

# Okabe and Ito's colours, which are safe for colour-blind readers. Black is cuBLAS.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d31", "#6a51a3")
MARKERS = "osD^vP*X"
GREY = "#767676"
# Text stays text in the SVG, and the file depends on neither time nor machine.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mpjax",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def style_of(index: int) -> tuple[str, str, str]:
    """The colour and marker of a line, and the marker's fill: white when colours repeat."""
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    return color, marker, color if index < len(COLORS) else "white"


@contextlib.contextmanager
def figure_of(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yields a figure of `size` inches, which is saved to `path` at the end."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
