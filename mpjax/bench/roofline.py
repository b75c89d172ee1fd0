"""Plots benchmark results below their rooflines, as SVG.

Roofs are measured in the same run as the results: the memory roof with an XLA reduction of the same
bytes, the compute roof by the fastest cuBLAS product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.bench import attention, gemm, generate
from mpjax.bench.figures import COLORS, GREY, Axes, figure_of, style_of
from mpjax.kernels.attention.shapes import AttentionShape

Rows = Sequence[Mapping[str, Any]]


def models(rows: Rows) -> list[str]:
    """The distinct names of the models in the rows' shapes, in order."""
    return list(dict.fromkeys(row["shape"].partition(".")[0] for row in rows))


def draw_gemm(rows: Rows, path: Path) -> None:
    """Draws TFLOP/s over the rows of x, with a panel for each shape and a line for each format."""
    rows = [gemm.figures(row) for row in rows]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    with figure_of(path, (4.6 * columns, 3.2 * lines + 0.9)) as figure:
        panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
        compute = max(row["cublas_teraflops"] for row in rows)
        for panel, shape in zip(panels, shapes, strict=False):
            _gemm_panel(panel, [row for row in rows if row["shape"] == shape], formats, compute)
        for panel in panels[len(shapes) :]:
            panel.set_visible(False)
        # The legend is that of the panel with the most lines, as a shape may lack some formats.
        fullest = max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
        handles, labels = fullest.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _gemm_panel(axes: Axes, rows: Rows, formats: Sequence[str], compute: float) -> None:
    by_format = {
        name: sorted((row for row in rows if row["format"] == name), key=lambda row: row["M"])
        for name in formats
    }
    cublas = dict(sorted((row["M"], row["cublas_teraflops"]) for row in rows))
    for index, (name, measured) in enumerate(by_format.items()):
        if not measured:
            continue
        color, marker, face = style_of(index)
        all_rows, heights = ([row[key] for row in measured] for key in ("M", "teraflops"))
        style: dict[str, Any] = {"marker": marker, "markersize": 3.5, "mfc": face, "lw": 1.4}
        axes.plot(all_rows, heights, label=name, color=color, **style)
        axes.plot(*memory_roof(measured, compute), color=color, ls="--", lw=0.9)
    axes.plot(list(cublas), list(cublas.values()), color="black", lw=1, label="cuBLAS bf16")
    axes.axhline(compute, color=GREY, ls=":", lw=1, label="compute roof (best cuBLAS bf16)")
    axes.plot([], [], color=GREY, ls="--", lw=0.9, label="memory roof of a format")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["M"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7.5)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("TFLOP/s")
    axes.label_outer()  # for all panels in a row
    axes.set_xlabel("M, rows of x")
    axes.tick_params(labelbottom=True)
    axes.set_title(f"{rows[0]['shape']}   K {rows[0]['K']}, N {rows[0]['N']}", fontsize=9)


def memory_roof(rows: Rows, compute: float) -> tuple[list[float], list[float]]:
    """The two ends of the memory roof of a format's rows: values of M, and of TFLOP/s.

    compute: TFLOP/s of the compute roof, where the memory roof ends. Both lists are empty if the
        memory roof begins above it.
    """
    slope = rows[0]["teraflops"] * rows[0]["times_floor"] / rows[0]["M"]
    first, last = rows[0]["M"], min(rows[-1]["M"], compute / slope)
    ends = [first, last] if last > first else []
    return ends, [slope * rows for rows in ends]


def draw_attention(rows: Rows, path: Path) -> None:
    """Draws the speed-up of decoding attention over cuDNN, by shape, the smallest first.

    Each format has a marker, and a dash at its memory roof. Left out are prefill, which memory
    bandwidth does not limit, and latents, for which cuDNN has no attention.
    """
    rows = [row for row in rows if row["queries"] == 1 and row["cudnn_microseconds"] is not None]
    rows = [attention.figures(row) for row in rows]
    rows.sort(
        key=lambda row: (
            sum(AttentionShape.parse(row["shape"]).lengths) * row["kv_heads"] * row["head_dim"]
        )
    )
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    formats = sorted({row["format"] for row in rows})
    with figure_of(path, (3.0 + 0.32 * len(shapes), 4.8)) as figure:
        axes = figure.subplots()
        for index, name in enumerate(formats):
            measured = [row for row in rows if row["format"] == name]
            aside = 0.7 * (index / len(formats) - 0.5)
            places = [shapes.index(row["shape"]) + aside for row in measured]
            color, marker, face = style_of(index)
            speedups = [row["speedup"] for row in measured]
            axes.scatter(places, speedups, s=14, marker=marker, color=color, fc=face, label=name)
            roofs = [row["cudnn_microseconds"] / row["floor_microseconds"] for row in measured]
            axes.scatter(places, roofs, s=30, marker="_", color=color, lw=1)
        axes.scatter([], [], s=30, marker="_", color=GREY, lw=1, label="memory roof of a format")
        axes.axhline(1, color="black", lw=1, label="cuDNN bf16")
        axes.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("times as fast as cuDNN")
        figure.legend(loc="outside lower center", ncols=4)


def draw_generate(rows: Rows, path: Path) -> None:
    """Draws tokens/s and the memory roofline, with a panel for each batch.

    With one context length, rows are bars. With several, each precision is a line over the lengths.
    """
    rows = [generate.figures(row) for row in rows]
    if len({row["prompt_tokens"] for row in rows}) > 1:
        _draw_contexts(rows, path)
        return
    batches = sorted({row["batch"] for row in rows})
    height = 0.34 * len(rows) + 0.75 * len(batches) + 0.5
    with figure_of(path, (7.2, height)) as figure:
        counts = [sum(row["batch"] == batch for row in rows) for batch in batches]
        ratios = {"height_ratios": counts}
        panels = figure.subplots(len(batches), 1, squeeze=False, gridspec_kw=ratios).flat
        for panel, batch in zip(panels, batches, strict=True):
            _generate_panel(panel, [row for row in rows if row["batch"] == batch])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)


def _generate_panel(axes: Axes, rows: Rows) -> None:
    rows = sorted(rows, key=lambda row: row["decode_tokens_per_second"])
    names = [row["precision"] for row in rows]
    roofs = [row["roofline_tokens_per_second"] for row in rows]
    measured = [row["decode_tokens_per_second"] for row in rows]
    axes.barh(names, roofs, color="#d9e6f0", label="memory roofline")
    bars = axes.barh(names, measured, height=0.5, color=COLORS[0], label="measured, with its share")
    texts = [f" {row['decode_tokens_per_second']:.0f}, {row['roofline_share']:.0%}" for row in rows]
    axes.bar_label(bars, texts, fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("tokens/s")
    axes.set_title(f"batch {rows[0]['batch']}", fontsize=9, loc="left")


def _draw_contexts(rows: Rows, path: Path) -> None:
    batches = sorted({row["batch"] for row in rows})
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    columns = min(2, len(batches))
    lines = -(-len(batches) // columns)
    with figure_of(path, (3.6 + 3.2 * columns, 3.4 * lines + 0.9)) as figure:
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for panel, batch in zip(panels, batches, strict=False):
            chosen = [row for row in rows if row["batch"] == batch]
            _context_panel(panel, chosen, precisions)
        for panel in panels[len(batches) :]:
            panel.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _context_panel(axes: Axes, rows: Rows, precisions: Sequence[str]) -> None:
    for index, precision in enumerate(precisions):
        measured = [row for row in rows if row["precision"] == precision]
        measured.sort(key=lambda row: row["prompt_tokens"])
        contexts = [row["prompt_tokens"] for row in measured]
        color, marker, face = style_of(index)
        heights = [row["decode_tokens_per_second"] for row in measured]
        style: dict[str, Any] = {"marker": marker, "markersize": 3.5, "mfc": face, "lw": 1.4}
        axes.plot(contexts, heights, label=precision, color=color, **style)
        roofs = [row["roofline_tokens_per_second"] for row in measured]
        axes.plot(contexts, roofs, color=color, ls="--", lw=0.9)
    axes.plot([], [], color=GREY, ls="--", lw=0.9, label="memory roofline of a precision")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["prompt_tokens"] for row in rows})
    axes.set_xticks(ticks, [_thousands(tick) for tick in ticks], fontsize=7.5)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    axes.set_xlabel("context, tokens")
    axes.set_title(f"batch {rows[0]['batch']}", fontsize=9, loc="left")


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
