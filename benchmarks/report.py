"""Writes docs/benchmarks.md from the results that the other benchmarks saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from mpjax.cli.evaluate import markdown

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> None:
    """Writes the page."""
    parts = [(Path(__file__).parent / "benchmarks_intro.md").read_text()]
    for build in (_end_to_end, _gemm, _attention, _perplexity):
        parts.append(build())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(parts))
    print(PAGE)


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _source(result: dict[str, Any], command: str) -> str:
    return (
        f"`{command}` · {result['device']}, jax {result['versions']['jax']}, "
        f"commit {result['commit'] or 'not recorded'}\n"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _end_to_end() -> str:
    parts = ["## End to end: Qwen3-8B's shapes, random weights\n"]
    rows = []
    shares, sources = [], []
    for path in sorted(RESULTS.glob("end_to_end-*.json")):
        result = json.loads(path.read_text())
        step, roofline = result["decode_step_microseconds"], result["roofline_microseconds"]
        rows.append(
            [
                result["precision"],
                result["batch"],
                f"{result['load_seconds']:.1f} s",
                f"{result['time_to_first_token_seconds'] * 1e3:.1f} ms",
                f"{result['decode_tokens_per_second']:.0f}",
                f"{step:.0f} µs",
                f"{result['sum_of_kernels_microseconds']:.0f} µs",
                f"{roofline:.0f} µs ({roofline / step:.0%})",
                f"{result['peak_bytes'] / 1e9:.1f} GB",
            ]
        )
        shares.append(_shares(result))
        command = f"--precision {result['precision']} --batch {result['batch']}"
        sources.append(_source(result, f"python -m benchmarks.end_to_end {command}"))
    parts.append(
        _table(
            [
                "precision",
                "batch",
                "load",
                "first token",
                "tokens/s",
                "step",
                "sum of its kernels",
                "memory roofline",
                "peak memory",
            ],
            rows,
        )
    )
    return "\n".join(parts + sources + shares)


def _shares(result: dict[str, Any]) -> str:
    kernels: dict[str, float] = result["kernel_microseconds_per_step"]
    total = sum(kernels.values())
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:10]
    rows = [[name, f"{time:.0f} µs", f"{time / total:.0%}"] for name, time in largest]
    rest = total - sum(time for _, time in largest)
    rows.append(["everything else", f"{rest:.0f} µs", f"{rest / total:.0%}"])
    title = f"Kernels of a decoding step, {result['precision']}, batch {result['batch']}:\n"
    return "\n".join([title, _table(["kernel", "time", "share"], rows)])


def _gemm() -> str:
    result = _load("gemm")
    rows = [
        [
            f"{row['K']} × {row['N']}",
            row["format"],
            row["M"],
            f"{row['microseconds']:.1f}",
            f"{row['microseconds'] / row['floor_microseconds']:.2f}",
            f"{row['cublas_microseconds']:.1f}",
            f"{row['cublas_microseconds'] / row['microseconds']:.2f}",
            f"{row['relative_error']:.1e}",
        ]
        for row in result["results"]
    ]
    header = ["K × N", "format", "M", "µs", "× floor", "cuBLAS µs", "speed-up", "error"]
    return "\n".join(
        [
            "## Dequantise-GEMM\n",
            _table(header, rows),
            _source(result, "python -m benchmarks.gemm"),
        ]
    )


def _attention() -> str:
    result = _load("attention")
    rows = [
        [
            row["shape"],
            row["format"],
            f"{row['microseconds']:.1f}",
            f"{row['cache_bytes'] / row['microseconds'] / 1e6:.2f}",
            f"{row['microseconds'] / row['floor_microseconds']:.2f}",
            f"{row['cudnn_microseconds']:.1f}",
            f"{row['cudnn_microseconds'] / row['microseconds']:.2f}",
            "" if row["relative_error"] is None else f"{row['relative_error']:.1e}",
        ]
        for row in result["results"]
    ]
    header = ["shape", "format", "µs", "TB/s", "× floor", "cuDNN µs", "speed-up", "error"]
    return "\n".join(
        [
            "## Paged decode attention\n",
            _table(header, rows),
            _source(result, "python -m benchmarks.attention"),
        ]
    )


def _perplexity() -> str:
    result = _load("perplexity")
    return "\n".join(
        [
            "## Perplexity of the bundled model\n",
            "On its held-out text, every token read through the cache; Δ against the first row.\n",
            markdown(result["rows"]) + "\n",
            "`mpjax evaluate --output benchmarks/results/perplexity.json` · "
            f"{result['device']}, jax {result['versions']['jax']}\n",
        ]
    )


if __name__ == "__main__":
    main()
