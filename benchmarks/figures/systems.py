"""Figures of experts, speculation, serving and several devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from benchmarks import speculation
from benchmarks.commands import Row, models_or_shapes, options, rows_of, values
from benchmarks.report import Figures, Result, Results
from mpjax.bench import experts, serve, sums
from mpjax.bench import speculation as steps
from mpjax.bench.lengths import Lengths
from mpjax.kernels.experts.shapes import MODELS
from mpjax.models.presets import PUBLISHED

SUMMED_KIBIBYTES = "8,16,64,256,1024,4096,16384,65536"  # what `mpjax bench sums` measures usually


def _experts_command(result: Result) -> str:
    rows = rows_of([result])
    given = {
        "shapes": models_or_shapes(rows, MODELS),
        "formats": values(rows, "format"),
        "rows": values(rows, "M"),
    }
    return "mpjax bench gemm --experts" + options(given)


def _experts_table(results: Results) -> tuple[Sequence[str], Iterable[list[str]]]:
    rows = rows_of(results)
    return ("matrices", *experts.HEADERS), ([row["shape"], *experts.cells(row)] for row in rows)


def _steps_command(result: Result) -> str:
    rows = rows_of([result])
    given = {
        "precision": values(rows, "precision"),
        "batch": values(rows, "batch"),
        "new-tokens": rows[0]["new_tokens"],
        "speculate": values((costs for row in rows for costs in row["speculation"]), "k"),
    }
    return "mpjax bench generate" + options(given)


def _steps_table(results: Results) -> tuple[Sequence[str], Iterable[list[str]]]:
    return steps.HEADERS, itertools.chain.from_iterable(map(steps.rows, rows_of(results)))


def _serve_cells(row: Row) -> list[str]:
    gap = row.get("max_gap") or ""
    own = [str(row["chunk_tokens"]), gap] if row["through"] == "engine" else ["", ""]
    return [serve.describe(row["load"]), *own, *serve.cells(row)]


def _serve_command(result: Result) -> str:
    rows = rows_of([result])
    first, load = rows[0], rows[0]["load"]
    if "command" in first:
        return str(first["command"])
    static = [row["through"].rpartition(" ")[2] for row in rows if row["through"] != "engine"]
    given = {
        "requests": first["requests"],
        "prompt-tokens": Lengths(**load["prompt_tokens"]),
        "new-tokens": Lengths(**load["new_tokens"]),
        "chunk-tokens": first["chunk_tokens"],
        "static": static[0] if static else None,
    }
    return "mpjax bench serve" + options(given)


def _devices_cells(row: Row) -> list[str]:
    first = row.get("time_to_first_token_seconds")
    return [
        row["precision"],
        str(row["layers"]),
        str(row["batch"]),
        str(row["devices"]) + ", whole experts" * (row.get("experts") == "whole"),
        "" if first is None else f"{first * 1e3:.0f} ms",
        f"{row['decode_tokens_per_second']:.0f}",
        f"{row['decode_step_microseconds'] / 1e3:.2f} ms",
        f"{row['roofline_share']:.0%}",
        f"{row['cache_tokens_that_fit']:,}",
    ]


DEVICES_HEADERS = (
    *("precision", "layers", "batch", "devices", "first token", "tokens/s", "step"),
    *("of roofline", "cache tokens"),
)


def _devices(shapes: str) -> Figures:
    """Decoding by one device and by several, of a preset's shapes with random weights."""

    def command(result: Result) -> str:
        rows = rows_of([result])
        first = rows[0]
        given = {
            "shapes": shapes,
            "devices": values(rows, "devices"),
            "batch": values(rows, "batch"),
            "precision": values(rows, "precision"),
            "experts": first.get("experts"),
            "layers": first["layers"],
            "prompt-tokens": first["prompt_tokens"],
            "piece-tokens": first.get("piece_tokens"),
            "new-tokens": first["new_tokens"],
            "filled": any(row["filled"] for row in rows),
        }
        usual = {
            **{"precision": "W4A16KV8", "experts": "divided", "prompt-tokens": 2048},
            **{"new-tokens": 256, "layers": PUBLISHED[shapes][1].num_layers},
        }
        return "mpjax bench generate" + options(given, usual)

    return Figures(
        (f"devices-{shapes}*.json",),
        lambda results: (DEVICES_HEADERS, map(_devices_cells, rows_of(results))),
        command,
    )


def _sums_command(result: Result) -> str:
    rows = rows_of([result])
    given = {
        "devices": values(rows, "devices"),
        "sizes": ",".join(dict.fromkeys(str(row["bytes"] // 1024) for row in rows)),
        "dtypes": values(rows, "dtype"),
        "ways": values(rows, "way", "psum"),
    }
    usual = {"sizes": SUMMED_KIBIBYTES, "dtypes": "bfloat16,float32", "ways": "psum"}
    return "mpjax bench sums" + options(given, usual)


FIGURES = {
    "experts": Figures(("experts*.json",), _experts_table, _experts_command),
    "speculation-steps": Figures(("speculation-steps*.json",), _steps_table, _steps_command),
    "speculation-text": Figures(
        ("speculation-text*.json",),
        lambda results: (speculation.HEADERS, map(speculation.cells, rows_of(results))),
        lambda result: speculation.command(rows_of([result])),
    ),
    "serve": Figures(
        ("serve*.json",),
        lambda results: (
            ("load", "chunk", "gap", *serve.HEADERS),
            map(_serve_cells, rows_of(results)),
        ),
        _serve_command,
    ),
    **{
        f"devices-{shapes}": _devices(shapes)
        for shapes in ("llama3-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
    },
    "sums": Figures(
        ("sums*.json",),
        lambda results: (sums.HEADERS, map(sums.cells, rows_of(results))),
        _sums_command,
    ),
}
