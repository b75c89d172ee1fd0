"""Makes the four tables of docs/benchmarks.md from a selection of the saved results."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpjax.bench import tables
from mpjax.kernels.attention.shapes import AttentionShape

Row = Mapping[str, Any]

CONTEXT = 2048  # tokens before the first decoded one
BATCHES = (1, 16, 64)
SHAPE, ROWS = "qwen3-8b.gate_up", (1, 16, 64, 256, 4096)
# (batch, tokens of each sequence) of shapes with 32 query heads and 8 KV heads of 128 channels.
CACHES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (32, 4096), (128, 2048))


def generate(rows: Sequence[Row]) -> str:
    """Table of tokens/s by precision and batch, with the share of the roofline."""
    found = {
        (row["precision"], row["batch"]): row
        for row in rows
        if row["prompt_tokens"] == CONTEXT and row["batch"] in BATCHES
    }

    def cell(row: Row) -> str:
        return f"{row['decode_tokens_per_second']:.0f} ({row['roofline_share']:.0%})"

    headers = ["tokens/s (of the roofline)", *(f"batch {batch}" for batch in BATCHES)]
    return _grid(headers, found, BATCHES, cell)


def gemm(rows: Sequence[Row]) -> str:
    """Table of the speed-up over cuBLAS by format and rows of x, with the time over the floor.

    For formats with 8-bit activations, a measurement with x already rounded is preferred, since a
    model's norm rounds x.
    """
    whole = [row for row in rows if not row.get("forced") and not row.get("in_model")]
    found: dict[tuple[str, int], Row] = {}
    # A later row replaces an earlier one, so rows with rounded x come last.
    for row in sorted(whole, key=lambda row: bool(row.get("rounded"))):
        if row["shape"] == SHAPE and row["M"] in ROWS:
            found[row["format"], row["M"]] = row
    headers = ["× cuBLAS (× floor)", *(f"{rows} rows" for rows in ROWS)]
    return _grid(headers, found, ROWS, _speed_and_floor)


def attention(rows: Sequence[Row]) -> str:
    """Table of the speed-up over cuDNN on 16 bits by format and cache, with time over floor."""
    shapes = {
        AttentionShape(batch, 32, 8, 128, tokens).name: (batch, tokens) for batch, tokens in CACHES
    }
    found = {(row["format"], shapes[row["shape"]]): row for row in rows if row["shape"] in shapes}
    headers = ["× cuDNN (× floor)", *(f"{batch} × {tokens}" for batch, tokens in CACHES)]
    return _grid(headers, found, CACHES, _speed_and_floor, least=2)


def perplexity(rows: Sequence[Row]) -> str:
    """Table of the bundled model's perplexity by precision, with the change from the first."""
    found = {row["precision"]: row["perplexity"] for row in rows}
    first = rows[0]["perplexity"]
    cells = [[name, f"{value:.3f}", f"{value / first - 1:+.1%}"] for name, value in found.items()]
    return tables.markdown(["precision", "perplexity", "Δ"], cells)


def _speed_and_floor(row: Row) -> str:
    return f"{row['speedup']:.2f} ({row['times_floor']:.2f})"


def _grid(
    headers: Sequence[str],
    found: Mapping[tuple[str, Any], Row],
    columns: Iterable[Any],
    cell: Callable[[Row], str],
    least: int = 1,
) -> str:
    """A Markdown table with a line for each name, sorted, and a cell for each column.

    found: rows by (name, column). cell: the text of a row's cell. least: the number of cells that a
    name needs; a name with fewer is left out.
    """
    columns = list(columns)
    counts = collections.Counter(name for name, _ in found)
    lines = [
        [name, *(cell(found[name, key]) if (name, key) in found else "" for key in columns)]
        for name, count in sorted(counts.items())
        if count >= least
    ]
    return tables.markdown(headers, lines)
