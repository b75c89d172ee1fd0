"""The four tables of docs/benchmarks.md: a selection of the saved results."""

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
# [batch, tokens of each sequence], of 32 query heads and 8 KV heads of 128 channels.
CACHES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (32, 4096), (128, 2048))


def generate(rows: Sequence[Row]) -> str:
    """Tokens/s of each precision and batch, and their share of the roofline."""
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
    """How many times as fast as cuBLAS each format is, by rows of x.

    8-bit activations come rounded, as from a model's norm, where that was measured.
    """
    whole = [row for row in rows if not row.get("forced") and not row.get("in_model")]
    found: dict[tuple[str, int], Row] = {}
    for row in sorted(whole, key=lambda row: bool(row.get("rounded"))):  # rounded ones replace
        if row["shape"] == SHAPE and row["M"] in ROWS:
            found[row["format"], row["M"]] = row
    headers = ["× cuBLAS (× floor)", *(f"{rows} rows" for rows in ROWS)]
    return _grid(headers, found, ROWS, _speed_and_floor)


def attention(rows: Sequence[Row]) -> str:
    """How many times as fast as cuDNN over 16 bits each format is, by batch and context."""
    shapes = {
        AttentionShape(batch, 32, 8, 128, tokens).name: (batch, tokens) for batch, tokens in CACHES
    }
    found = {(row["format"], shapes[row["shape"]]): row for row in rows if row["shape"] in shapes}
    headers = ["× cuDNN (× floor)", *(f"{batch} × {tokens}" for batch, tokens in CACHES)]
    return _grid(headers, found, CACHES, _speed_and_floor, least=2)


def perplexity(rows: Sequence[Row]) -> str:
    """Perplexity of the bundled model in each precision, once each, against the first."""
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
    """A table with a line for each name in text order, and a column for each second key.

    least: cells that a line has, or is left out.
    """
    columns = list(columns)
    counts = collections.Counter(name for name, _ in found)
    lines = [
        [name, *(cell(found[name, key]) if (name, key) in found else "" for key in columns)]
        for name, count in sorted(counts.items())
        if count >= least
    ]
    return tables.markdown(headers, lines)
