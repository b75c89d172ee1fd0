"""Figures of what kernels are compiled to for GPUs that were not there, and of their bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpus import GPUS
from benchmarks.report import Figures, Results, rows_of
from mpjax.kernels import ProductFormat, device
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule

# The step of Qwen3-8B's shapes whose bytes bound the tokens a second of a GPU.
STEP = {"precision": "W4A16KV8", "batch": 1, "prompt_tokens": 1024}
OF_XLA = "fusion", "wrapped_"  # in the names of its kernels
ROWS = [2**bits for bits in range(15)]  # of products


def runs(row: Mapping[str, Any]) -> str:
    """What runs the calls of a row on its GPU."""
    if row["failed"]:
        return f"{len(row['failed'])} of {row['count']} calls don't compile"
    kind, _, text = row["calls"].partition(" ")
    if kind == "matmul":
        found = product(text, row["gpu"])
    else:
        own = any(not any(part in name for part in OF_XLA) for name in row["kernels"])
        found = "fused" if own else "refused" if row["refused"] else "plain JAX"
    return found + (f", {row['spilled']} bytes spilled" if row["spilled"] else "")


def product(text: str, name: str) -> str:
    """What multiplies with weights of a format on one of GPUS, by the number of rows."""
    gpu = GPUS[name]
    limits = device.Limits(gpu.multiprocessors, gpu.compute_capability)
    plans = [
        plan_by_rule(Problem(rows, ProductFormat.of(text), 4096, 24576, limits)).implementation
        for rows in ROWS
    ]
    fused = [rows for rows, plan in zip(ROWS, plans, strict=True) if plan in ("triton", "mosaic")]
    if len(fused) == len(ROWS):
        return "fused"
    return f"fused to {max(fused)} rows, then {plans[-1]}" if fused else plans[-1]


def _table(results: Results) -> tuple[list[str], Iterator[list[str]]]:
    """A line for all kinds of calls with the same cells."""
    gpus = [result["device"] for result in results]
    rows = {(row["calls"], row["gpu"]): row for row in rows_of(results)}
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in dict.fromkeys(calls for calls, _ in rows):
        cells = tuple(runs(rows[kind, gpu]) if (kind, gpu) in rows else "" for gpu in gpus)
        kinds.setdefault(cells, []).append(f"`{kind}`")
    lines = ([", ".join(group), *cells] for cells, group in kinds.items())
    return ["calls", *map(_short, gpus)], lines


def _cards(results: Results) -> tuple[list[str], Iterator[list[str]]]:
    """A line for each GPU: its sizes, what the largest kernels take of them, and its bound.

    results: of GPUs, and last those of steps.
    """
    *compiled, steps = results
    headers = ["GPU", "compute capability", "multiprocessors", "memory", "bandwidth"]
    headers += [
        "shared memory of a program",
        "most taken",
        "most registers",
        "spilling calls",
        "bound",
    ]
    [step] = (row for row in rows_of([steps]) if row.items() >= STEP.items())

    def lines() -> Iterator[list[str]]:
        for result in compiled:
            gpu, rows = GPUS[result["device"]], rows_of([result])
            shared = device.shared_memory(gpu.compute_capability) // 1024
            taken, registers = (
                max(row[field] for row in rows) for field in ("shared", "registers")
            )
            spilling = sum(len(row["spilling"]) for row in rows)
            calls = sum(row["count"] for row in rows)
            bound = gpu.bandwidth * 1e9 / step["step_bytes"]
            yield [
                *(_short(result["device"]), str(gpu.compute_capability), str(gpu.multiprocessors)),
                *(f"{gpu.memory} GiB", f"{gpu.bandwidth} GB/s", f"{shared} KiB"),
                *(
                    f"{taken / 1024:.0f} KiB",
                    str(registers),
                    f"{spilling} of {calls}",
                    f"{bound:.0f} tokens/s",
                ),
            ]

    return headers, lines()


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


FIGURES = {
    "compiled": Figures(("compiled-*.json",), _table, is_joined=True),
    "compiled-gpus": Figures(("compiled-*.json", "generate-context.json"), _cards, is_joined=True),
}
