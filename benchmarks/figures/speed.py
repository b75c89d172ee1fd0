"""Figures of whole models, products and attention, measured by `mpjax bench`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Figures, Result, Results, of_columns, rows_of
from mpjax.bench import attention, gemm, generate, roofline, tables
from mpjax.kernels import ProductFormat, WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans import OPERATION, Problem, plan_by_rule
from mpjax.kernels.plans.tables import SHIPPED, file_name, read

KERNELS = 10  # the number of a decoding step's kernels that are listed by name
GPUS = {"NVIDIA H200": Limits(132, 9.0)}  # GPUs with a shipped table, and their limits


def _generate_notes(result: Result) -> Iterator[str]:
    """Notes below the table of a file, among them the longest kernels of its first row."""
    rows = rows_of([result])
    if any(row.get("filled") for row in rows):
        yield (
            "Rows without a time to the first token decode from a cache of random keys and values, "
            "for which there is no text to check against."
        )
    if not all("step_bytes" in row for row in rows):
        yield "Peak memory includes the 2 GB with which bandwidth was measured."
    first, kernels = rows[0], rows[0]["kernel_microseconds_per_step"]
    total = sum(kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:KERNELS]
    rest = total - sum(time for _, time in longest)
    lines = [
        [name, f"{time:.0f} µs", f"{time / total:.0%}"]
        for name, time in [*longest, ("everything else", rest)]
    ]
    yield (
        f"Kernels of a decoding step, {first['precision']}, batch {first['batch']}, after "
        f"{first['prompt_tokens']} tokens:\n\n"
        + tables.markdown(["kernel", "time", "share"], lines).removesuffix("\n")
    )


def _draw_generate(results: Results, folder: Path) -> Iterable[tuple[str, str]]:
    rows = rows_of(results)
    over_contexts = len({row["prompt_tokens"] for row in rows}) > 1
    name = "generate-context.svg" if over_contexts else "generate.svg"
    roofline.draw_generate(rows, folder / name)
    above = "over the context" if over_contexts else "below the memory roofline"
    return [(f"tokens per second {above}", name)]


def _gemm_table(results: Results) -> tuple[Sequence[str], list[list[str]]]:
    """A line for each product; an asterisk marks products with a different plan shipped now."""
    rows = [
        {**gemm.figures(row), "mark": " \\*" * runs_otherwise(row, result["device"])}
        for result in results
        for row in rows_of([result])
    ]
    columns = {"K × N": "{K} × {N}"} | gemm.COLUMNS
    return tables.table(
        columns | {"as": lambda row: row.get("implementation", "") + row["mark"]}, rows
    )


def _gemm_notes(result: Result) -> Iterator[str]:
    rows = rows_of([result])
    if changed := sum(runs_otherwise(row, result["device"]) for row in rows):
        yield f"\\* Measured with an older plan: {changed} of {len(rows)} rows."
    if not all("packed_bytes" in row for row in rows):
        yield "The floor of this table reads codes without scales and zero points."


def _draw_gemm(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    """Plots for each model the whole products with planned implementations, on one GPU."""
    rows = [row for row in of_one_gpu(results) if not _is_partial(row)]
    for model in roofline.models(rows):
        name = f"gemm-{model}.svg"
        chosen = [row for row in rows if row["shape"].partition(".")[0] == model]
        roofline.draw_gemm(chosen, folder / name)
        yield f"TFLOP/s over rows, below the rooflines, {model}", name


def of_one_gpu(results: Results) -> list[dict[str, Any]]:
    """The rows of the GPU with the most results: plots don't compare GPUs."""
    device = statistics.mode(result["device"] for result in results)
    return rows_of(result for result in results if result["device"] == device)


def _is_partial(row: Result) -> bool:
    """Whether a row measured only a part of a product, or a forced implementation."""
    is_rounded = row.get("rounded") and WeightFormat.parse(row["format"]).operand is not None
    return bool(row.get("forced") or row.get("in_model") or is_rounded)


@functools.cache
def _shipped(device: str) -> Mapping[Any, Any]:
    """The entries of the table shipped for a GPU."""
    return read(OPERATION, SHIPPED / file_name(device), device).entries


def runs_otherwise(row: Result, device: str) -> bool:
    """Whether the shipped table or the rule now has a different plan for a measured product.

    device: the GPU of the row; False for a GPU without a shipped table.
    """
    if row.get("forced") or "configuration" not in row or device not in GPUS:
        return False
    format = WeightFormat.parse(row["format"])
    problem = Problem(row["M"], ProductFormat.of(format), row["K"], row["N"], GPUS[device])
    entry = OPERATION.find(_shipped(device), OPERATION.key_of(problem))
    plan = entry.plan if entry else plan_by_rule(problem)
    if plan.implementation != row["implementation"]:
        return True
    # A field that configurations lacked when the row was measured gets its default.
    return plan.config is not None and plan.config != type(plan.config)(**row["configuration"])


def _attention_notes(result: Result) -> Iterator[str]:
    if not all("copies" in row for row in rows_of([result])):
        yield "Calls read the same copy: a cache below 60 MB may be in the L2 cache."


def _draw_attention(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    if rows := [row for row in rows_of(results) if row.get("queries") == 1]:
        roofline.draw_attention(rows, folder / "attention.svg")
        yield "speed-up over cuDNN by context and format, below the rooflines", "attention.svg"


def _decoding(*patterns: str) -> Figures:
    table = of_columns(generate.COLUMNS, generate.figures)
    return Figures(patterns, table, plots=_draw_generate, notes=_generate_notes)


FIGURES = {
    "generate": _decoding("generate.json", "generate-[!c]*.json"),
    "generate-context": _decoding("generate-context.json"),
    "gemm": Figures(("gemm*.json",), _gemm_table, plots=_draw_gemm, notes=_gemm_notes),
    "attention": Figures(
        ("attention*.json",),
        of_columns(attention.COLUMNS, attention.figures),
        plots=_draw_attention,
        notes=_attention_notes,
    ),
}
