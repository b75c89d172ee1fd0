"""Figures of experts, speculation, serving and several devices."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import speculation
from benchmarks.report import Figures, Result, Results, of_columns, rows_of
from mpjax.bench import adapters, experts, mixers, serve, sums, tables
from mpjax.bench import speculation as steps

EXPERTS: tables.Columns = {"matrices": "{shape}", **experts.COLUMNS}
SERVE: tables.Columns = {
    "load": lambda row: serve.describe(row["load"]),
    "chunk": lambda row: str(row["chunk_tokens"]) if row["through"] == "engine" else "",
    "gap": lambda row: (row.get("max_gap") or "") if row["through"] == "engine" else "",
    **serve.COLUMNS,
}
DEVICES: tables.Columns = {
    "precision": "{precision}",
    "layers": "{layers}",
    "batch": "{batch}",
    "devices": lambda row: (
        str(row["devices"]) + ", whole experts" * (row.get("experts") == "whole")
    ),
    "first token": tables.scaled("{:.0f} ms", "time_to_first_token_seconds", 1e3),
    "tokens/s": "{decode_tokens_per_second:.0f}",
    "step": tables.scaled("{:.2f} ms", "decode_step_microseconds", 1e-3),
    "of roofline": "{roofline_share:.0%}",
    "cache tokens": "{cache_tokens_that_fit:,}",
}
CAPACITY: tables.Columns = {
    "model": "{model}",
    "KV format": "{kv}",
    "sequences": "{sequences}",
    "where all layers keep all tokens": "{without_windows}",
}
MIXERS: tables.Columns = {"model": "{shape}", **mixers.COLUMNS}


def _control(results: Results) -> tuple[list[str], list[list[str]]]:
    """The rates of an engine's requests of each kind, and their ratio to those of free requests."""
    headers = ["requests at once", "kind", "tokens/s", "of free"]
    lines = []
    for result in results:
        for name, row in result["results"].items():
            count, _, kind = name.partition("-")
            if kind:
                rate, ratio = row["tokens_per_second"], row["ratio"]
                lines.append([count, kind, f"{rate:,.0f}", f"{ratio:.2f}"])
    return headers, lines


DETERMINISTIC: tables.Columns = {
    "layers": "{layers}",
    "precision": "{precision}",
    "case": "{case}",
    "tokens that differ": "{differing}",
    "deterministic": "{own:.2f} ms",
    "usual": "{usual:.2f} ms",
    "of the speed": "{share:.2f}",
}


def _modes(results: Results) -> Iterator[Result]:
    """A row for each case of the results of benchmarks.deterministic."""
    for result in results:
        for case, count in result.get("differing", {}).items():
            yield {**result, "case": case, "differing": count}
        for case, own in result.get("milliseconds", {}).items():
            times = {"own": own, "usual": (usual := result["usual_milliseconds"][case])}
            yield {**result, "case": case, **times, "share": usual / own}


FIGURES = {
    "adapters": Figures(("adapters*.json",), of_columns(adapters.COLUMNS)),
    "control": Figures(("control*.json",), _control),
    "mixers": Figures(("mixers*.json",), of_columns(MIXERS, mixers.figures)),
    "cache-capacity": Figures(("cache-capacity.json",), of_columns(CAPACITY)),
    "experts": Figures(("experts*.json",), of_columns(EXPERTS, experts.figures)),
    "speculation-steps": Figures(
        ("speculation-steps*.json",),
        lambda results: tables.table(steps.COLUMNS, steps.rows(rows_of(results))),
    ),
    "speculation-text": Figures(("speculation-text*.json",), of_columns(speculation.COLUMNS)),
    "serve": Figures(("serve*.json",), of_columns(SERVE)),
    **{
        f"devices-{shapes}": Figures((f"devices-{shapes}*.json",), of_columns(DEVICES))
        for shapes in ("llama3-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
    },
    "deterministic": Figures(
        ("deterministic*.json",),
        lambda results: tables.table(DETERMINISTIC, _modes(results)),
    ),
    "sums": Figures(("sums*.json",), of_columns(sums.COLUMNS)),
}
