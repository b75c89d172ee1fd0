"""Figures that compare mpjax with other engines."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Figures, Result, Results

FIRST = "1 after 2048"  # the load of a single prompt


def _table(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    """A line for each file, with tokens/s of each load that occurs in any file."""
    loads = list(dict.fromkeys(row["load"] for result in results for row in result["results"]))
    headers = ["engine", "weights", *loads, "first token", "start"]
    return headers, [_cells(result, loads) for result in results]


def _cells(result: Result, loads: Sequence[str]) -> list[str]:
    rows = {row["load"]: row for row in result["results"]}
    rates = [f"{rows[load]['tokens_per_second']:,.0f}" if load in rows else "" for load in loads]
    first = rows[FIRST].get("first_tokens_seconds") if FIRST in rows else None
    start = result.get("start_seconds")

    return [
        result["engine"],
        result["weights"],
        *rates,
        "" if first is None else f"{first * 1e3:,.0f} ms",
        "" if start is None else f"{start:.0f} s",
    ]


def _cpu(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    """A line for each system of `benchmarks.cpu`, with the fastest of its rounds."""
    headers = ["", "load", "first answer", "tokens/s, 1 sequence", "tokens/s, 8 sequences"]
    rows = []
    for result in results:
        for name, system in result["systems"].items():
            rates = [
                f"{size * result['tokens'] / found['least_seconds']:,.1f}" if found else ""
                for size in (1, 8)
                for found in [system["batches"].get(str(size))]
            ]
            times = system["load_seconds"], system["batches"]["1"]["first_seconds"]
            rows.append([name, *(f"{each:.1f} s" for each in times), *rates])
    return headers, rows


FIGURES = {
    f"peers-{model}": Figures((f"peers-{model}-*.json",), _table, is_joined=True)
    for model in ("qwen3-8b", "gpt-oss-20b")
}
FIGURES["cpu"] = Figures(("cpu.json",), _cpu, is_joined=True)
