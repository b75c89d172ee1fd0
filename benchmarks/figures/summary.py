"""The four tables of docs/benchmarks.md, selected from the saved results."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.figures.speed import of_one_gpu
from benchmarks.report import Figures, Results, rows_of
from benchmarks.report import Result as Row
from mpjax.bench import attention, gemm, generate
from mpjax.kernels.attention.shapes import AttentionShape

CONTEXT = 2048  # tokens before the first decoded one
BATCHES = (1, 16, 64)
SHAPE, ROWS = "qwen3-8b.gate_up", (1, 16, 64, 256, 4096)
# (batch, tokens of each sequence) of shapes with 32 query heads and 8 KV heads of 128 channels.
CACHES = ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (32, 4096), (128, 2048))
Table = tuple[Sequence[str], list[list[str]]]


def models(results: Results) -> Table:
    """Tokens/s and the share of the roofline, by precision and batch."""
    found = {
        (row["precision"], row["batch"]): row
        for row in map(generate.figures, rows_of(results))
        if row["prompt_tokens"] == CONTEXT and row["batch"] in BATCHES
    }

    def cell(row: Row) -> str:
        return f"{row['decode_tokens_per_second']:.0f} ({row['roofline_share']:.0%})"

    headers = ["tokens/s (of the roofline)", *(f"batch {batch}" for batch in BATCHES)]
    return headers, _grid(found, BATCHES, cell)


def products(results: Results) -> Table:
    """The speed-up over cuBLAS, and the time relative to the floor, by format and rows of x.

    For formats with 8-bit activations, a measurement with x already rounded is preferred, since a
    model's norm rounds x.
    """
    rows = map(gemm.figures, of_one_gpu(results))
    whole = [row for row in rows if not row.get("forced") and not row.get("in_model")]
    found: dict[tuple[str, int], Row] = {}
    # A later row replaces an earlier one, so rows with rounded x come last.
    for row in sorted(whole, key=lambda row: bool(row.get("rounded"))):
        if row["shape"] == SHAPE and row["M"] in ROWS:
            found[row["format"], row["M"]] = row
    headers = ["× cuBLAS (× floor)", *(f"{rows} rows" for rows in ROWS)]
    return headers, _grid(found, ROWS, _speed_and_floor)


def caches(results: Results) -> Table:
    """The speed-up over 16-bit cuDNN, and the time relative to the floor, by format and cache."""
    shapes = {
        AttentionShape(batch, 32, 8, 128, tokens).name: (batch, tokens) for batch, tokens in CACHES
    }
    found = {
        (row["format"], shapes[row["shape"]]): row
        for row in map(attention.figures, rows_of(results))
        if row["shape"] in shapes
    }
    headers = ["× cuDNN (× floor)", *(f"{batch} × {tokens}" for batch, tokens in CACHES)]
    return headers, _grid(found, CACHES, _speed_and_floor, least=2)


def perplexity(results: Results) -> Table:
    """The bundled model's perplexity by precision, with the change from the first."""
    found = {row["precision"]: row["perplexity"] for row in rows_of(results)}
    first = next(iter(found.values()))
    lines = [[name, f"{value:.3f}", f"{value / first - 1:+.1%}"] for name, value in found.items()]
    return ["precision", "perplexity", "Δ"], lines


def _speed_and_floor(row: Row) -> str:
    return f"{row['speedup']:.2f} ({row['times_floor']:.2f})"


def _grid(
    found: Mapping[tuple[str, Any], Row],
    columns: Iterable[Any],
    cell: Callable[[Row], str],
    least: int = 1,
) -> list[list[str]]:
    """A line for each name, sorted, with a cell for each column.

    found: rows by (name, column). cell: the text of a row's cell. least: the number of cells that a
    name needs; a name with fewer is left out.
    """
    columns = list(columns)
    counts = collections.Counter(name for name, _ in found)
    return [
        [name, *(cell(found[name, key]) if (name, key) in found else "" for key in columns)]
        for name, count in sorted(counts.items())
        if count >= least
    ]


FIGURES = {
    "summary-models": Figures(("generate*.json",), models, is_joined=True),
    "summary-products": Figures(("gemm*.json",), products, is_joined=True),
    "summary-attention": Figures(("attention*.json",), caches, is_joined=True),
    "summary-perplexity": Figures(
        ("perplexity.json", "perplexity-calibrated.json"), perplexity, is_joined=True
    ),
}
