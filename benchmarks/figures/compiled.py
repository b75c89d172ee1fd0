"""Figures of kernels compiled for GPUs without the GPU, and of bounds of these GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpus import GPUS
from benchmarks.report import Figures, Results, rows_of
from mpjax.kernels import ProductFormat, device
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.rule import plan_by_rule

# The decoding step of Qwen3-8B's shapes whose bytes bound a GPU's tokens per second.
STEP = {"precision": "W4A16KV8", "batch": 1, "prompt_tokens": 1024}
OF_XLA = "fusion", "wrapped_"  # in the names of XLA's kernels
ROWS = [2**bits for bits in range(15)]  # of products


def runs(row: Mapping[str, Any]) -> str:
    """The implementations that run a row's calls on its GPU, as text."""
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
    """The implementations of products in a format on one of GPUS, by number of rows, as text."""
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
    """A line for each set of kinds of calls with the same cells."""
    gpus = [result["device"] for result in results]
    rows = {(row["calls"], row["gpu"]): row for row in rows_of(results)}
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in dict.fromkeys(calls for calls, _ in rows):
        cells = tuple(runs(rows[kind, gpu]) if (kind, gpu) in rows else "" for gpu in gpus)
        kinds.setdefault(cells, []).append(f"`{kind}`")
    lines = ([", ".join(group), *cells] for cells, group in kinds.items())
    return ["calls", *map(_short, gpus)], lines


def _cards(results: Results) -> tuple[list[str], Iterator[list[str]]]:
    """A line for each GPU: its resources, the largest kernels' use of them, and its bound.

    results: one for each GPU, and as the last one the decoding steps.
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
