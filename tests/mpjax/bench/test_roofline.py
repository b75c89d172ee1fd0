from __future__ import annotations

import re

import pytest

from mpjax.bench import gemm, roofline
from mpjax.bench.figures import COLORS
from tests.mpjax.bench.rows import attention_row, gemm_row, generate_row


def gemm_rows():
    """Two shapes; at each, two formats whose times have nothing to do with one another."""
    for shape, outputs in (("model.first", 5000), ("model.second", 2500)):
        for format, time in (("uint4:g128", 10.0), ("uint8:g128", 16.0)):
            for rows in (1, 16, 256, 4096):
                slower = max(1.0, rows / 200)
                yield gemm_row(
                    shape=shape,
                    N=outputs,
                    M=rows,
                    format=format,
                    microseconds=1.3 * time * slower,
                    floor_microseconds=time,
                    cublas_microseconds=50.0 * slower,
                )


def labels(svg):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_products_are_drawn_with_everything_named(tmp_path):
    path = tmp_path / "new" / "gemm.svg"
    roofline.draw_gemm(list(gemm_rows()), path)
    found = labels(path.read_text())
    assert {"uint4:g128", "uint8:g128", "cuBLAS bf16", "memory roof of a format"} <= found
    assert {"compute roof (best cuBLAS bf16)", "TFLOP/s", "M, rows of x"} <= found
    assert {"model.first   K 4000, N 5000", "model.second   K 4000, N 2500"} <= found
    assert {"1", "16", "256", "4096", "100"} <= found


def test_more_formats_than_colors_can_be_told_apart(tmp_path):
    names = [f"table4:g{size}" for size in range(len(COLORS) + 1)]
    rows = [gemm_row(format=name, M=m) for name in names for m in (1, 16)]
    roofline.draw_gemm(rows, tmp_path / "gemm.svg")
    text = (tmp_path / "gemm.svg").read_text()
    assert set(names) <= labels(text)
    hollow = rf"fill: #ffffff; stroke: {COLORS[0]}"
    assert len(re.findall(hollow, text)) >= 2, "the first color's second format is not hollow"


def test_the_memory_roof_is_the_floor_up_to_the_compute_roof():
    rows = [gemm.figures(gemm_row(M=m, microseconds=20.0 * m)) for m in (1, 16, 4096)]
    # The floor of 10 µs allows 4 TFLOP/s for each row of x: 400 are reached at M = 100.
    x, y = roofline.memory_roof(rows, 400.0)
    assert x == pytest.approx([1, 100])
    assert y == pytest.approx([4, 400])
    assert roofline.memory_roof(rows, 1e6)[0] == pytest.approx([1, 4096])
    assert roofline.memory_roof(rows[2:], 400.0) == ([], [])


def test_generation_is_drawn_beside_its_roofline(tmp_path):
    rows = [
        generate_row(),
        generate_row(precision="W8A16KV8", step_bytes=6e9),
        generate_row(batch=16),
    ]
    roofline.draw_generate(rows, tmp_path / "generate.svg")
    found = {text.strip() for text in labels((tmp_path / "generate.svg").read_text())}
    assert {"W4A16KV8", "W8A16KV8", "batch 2", "batch 16", "tokens/s"} <= found
    assert {"memory roofline", "measured, with its share"} <= found
    assert {"1000, 50%", "1000, 75%", "8000, 50%"} <= found


def test_several_contexts_are_lines_below_their_rooflines(tmp_path):
    rows = [
        generate_row(precision=precision, batch=batch, prompt_tokens=context)
        for precision in ("W4A16KV8", "W4A16KV2")
        for batch in (1, 16, 64)
        for context in (1024, 3000, 131072)
    ]
    roofline.draw_generate(rows, tmp_path / "contexts.svg")
    found = labels((tmp_path / "contexts.svg").read_text())
    assert {"W4A16KV8", "W4A16KV2", "memory roofline of a precision"} <= found
    assert {"batch 1", "batch 16", "batch 64", "context, tokens", "tokens/s"} <= found
    assert {"1K", "3000", "128K"} <= found


def test_attention_is_drawn_with_the_smallest_cache_first(tmp_path):
    sizes = {"query_heads": 32, "kv_heads": 8, "head_dim": 125, "queries": 1, "context": 1000}
    rows = [
        attention_row(**sizes, batch=batch, shape=f"b{batch}-h32/8-d128-c1000", format=format)
        for batch in (100, 1)
        for format in ("KV8", "KV4")
    ]
    prompt = attention_row(**sizes | {"queries": 9}, batch=1, format="KV16")
    roofline.draw_attention([*rows, prompt], tmp_path / "attention.svg")
    text = (tmp_path / "attention.svg").read_text()
    found = labels(text)
    assert {"KV8", "KV4", "cuDNN bf16", "memory roof of a format"} <= found
    assert "times as fast as cuDNN" in found
    assert "KV16" not in found
    assert text.index(">b1-h32/8-d128-c1000<") < text.index(">b100-h32/8-d128-c1000<")
