"""Figures of the losses of quantisation, and of its memory and time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import blocks, memory, methods, quantization
from benchmarks.commands import options, rows_of, values
from benchmarks.report import Figures, Result, Results
from mpjax.bench import agreement_plot, blocks_plot
from mpjax.cli import evaluate

HELD_OUT = "held_out.jsonl"  # of the bundled model, the default text of `mpjax evaluate`


def _argument(result: Result) -> str:
    """The model as an argument of a command, whose default is the bundled one."""
    model = result.get("model", "bundled")
    return "" if model == "bundled" else f" {model}"


def _evaluate_command(result: Result) -> str:
    rows = rows_of([result])
    is_compared, is_calibrated = result.get("reference"), result.get("calibration")
    is_default = not (is_compared or is_calibrated or _argument(result))
    text = result.get("text", HELD_OUT)
    given = {
        "against": "itself" if is_compared else None,
        "text": None if text == HELD_OUT else text,
        "window": rows[0]["window"] if is_compared else None,
        "precisions": None if is_default else values(rows, "precision"),
        "calibrate": is_calibrated,
    }
    return f"mpjax evaluate{_argument(result)}" + options(given)


def _evaluate_table(results: Results) -> tuple[Sequence[str], list[Sequence[str]]]:
    return evaluate.table_of(rows_of(results))


def _draw_agreement(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    for result in results:
        rows = rows_of([result])
        if len({row["bits_per_weight"] for row in rows}) > 1:  # else a plot would show nothing
            name = f"agreement-{result['model'].lower()}.svg"
            agreement_plot.draw(rows, folder / name)
            yield "KL divergence and rise of perplexity over the bits of a weight", name


def _blocks_command(result: Result) -> str:
    amounts = {name: result.get(name) for name in ("tokens", "characters")}
    return f"python -m benchmarks.blocks{_argument(result)}" + options(amounts)


def _draw_blocks(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    for result in results:
        name = f"blocks-{result['model']}.svg"
        blocks_plot.draw(rows_of([result]), folder / name)
        yield f"rise of perplexity over the share of blocks in 8 bits, {result['model']}", name


def _memory_command(result: Result) -> str:
    given = {name: result[name] for name in ("precision", "method", "layers")}
    return "python -m benchmarks.memory" + options(given)


def _quantization_table(results: Results) -> tuple[Sequence[str], Iterable[list[str]]]:
    return quantization.HEADERS, map(quantization.cells, rows_of(results))


FIGURES = {
    "perplexity": Figures(("perplexity*.json",), _evaluate_table, _evaluate_command),
    "agreement": Figures(("agreement*.json",), _evaluate_table, _evaluate_command, _draw_agreement),
    "memory": Figures(
        ("memory*.json",),
        lambda results: (memory.HEADERS, map(memory.cells, rows_of(results))),
        _memory_command,
    ),
    "methods": Figures(
        ("methods*.json",),
        lambda results: (methods.HEADERS, map(methods.cells, rows_of(results))),
        lambda result: f"python -m benchmarks.methods{_argument(result)}",
    ),
    "blocks": Figures(
        ("blocks*.json",),
        lambda results: (blocks.HEADERS, map(blocks.cells, rows_of(results))),
        _blocks_command,
        _draw_blocks,
    ),
    "quantization": Figures(
        ("quantization.json",), _quantization_table, lambda _: "python -m benchmarks.quantization"
    ),
}
