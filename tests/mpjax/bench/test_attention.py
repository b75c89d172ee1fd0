from __future__ import annotations

import dataclasses
import functools
import math

import jax
import pytest

from mpjax.bench import attention, measure
from mpjax.kernels import KVFormat
from mpjax.kernels.attention.shapes import DECODE, PREFILL, RAGGED, AttentionShape
from tests.mpjax.bench.rows import attention_row

SHAPE = AttentionShape(2, 4, 2, 64, 160)


@pytest.fixture
def without_cudnn(monkeypatch):
    """jax.nn's attention by XLA, which every machine has."""
    attend = jax.nn.dot_product_attention

    @functools.wraps(attend)
    def by_xla(*arguments, implementation, **masks):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"):
            return attend(*arguments, implementation="xla", **masks)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


def test_figures_follow_from_times():
    numbers = {"batch": 1, "query_heads": 32, "kv_heads": 8, "head_dim": 125, "context": 1000}
    row = attention.figures(attention_row(**numbers))
    assert row["gigabytes_per_second"] == pytest.approx(2000.0)
    assert row["times_floor"] == pytest.approx(1.25)
    assert row["speedup"] == pytest.approx(1.5)
    assert row["teraflops"] == pytest.approx(0.8)  # 4 · 32 · 125 · 1000 in 20 µs
    assert attention.figures(row) == row
    row = attention.figures(row | {"queries": 3})
    assert row["teraflops"] == pytest.approx(0.8 * 2.997)  # that see 998, 999 and 1000 keys
    row = attention.figures(attention_row(**numbers, longest=7000) | {"batch": 3})
    assert row["teraflops"] == pytest.approx(0.8 * 9)


def test_cells_are_in_the_order_of_the_headers():
    row = attention_row(relative_error=None)
    assert dict(zip(attention.HEADERS, attention.cells(row), strict=True)) == {
        "shape": "b1-h32/8-d128-c1000",
        "format": "KV8",
        "µs": "20.0",
        "TB/s": "2.00",
        "TFLOP/s": "",
        "× floor": "1.25",
        "cuDNN µs": "30.0",
        "speed-up": "1.50",
        "append µs": "",
        "error": "",
    }
    row = attention_row(append_microseconds=1.26)
    assert dict(zip(attention.HEADERS, attention.cells(row), strict=True))["append µs"] == "1.3"


def test_errors_from_the_gate_on_fail_where_they_were_measured():
    rows = [attention_row(relative_error=error) for error in (7.9e-3, None, 8e-3, math.nan)]
    assert len(attention.failures(rows)) == 2
    assert "KV8: the error is 8.0e-03" in attention.failures(rows)[0]


def test_shapes_by_name():
    assert attention.named([DECODE[3].name, DECODE[0].name]) == (DECODE[3], DECODE[0])
    assert attention.named([PREFILL[2].name, "prefill"]) == (PREFILL[2], *PREFILL[:2], PREFILL[3])
    other = AttentionShape(512, 64, 8, 64, 524288)
    assert attention.named(["b512-h64/8-d64-c524288"]) == (other,)
    assert attention.named(["ragged"]) == RAGGED
    with pytest.raises(
        ValueError,
        match=r"unknown shape 'x'.*as in b8-.*; or one of the sets decode, ragged, prefill",
    ):
        attention.named(["x"])


def test_formats_that_are_none():
    with pytest.raises(ValueError, match="KV5"):
        attention.Sweep((SHAPE,), ("KV16", "KV5"))
    with pytest.raises(ValueError, match="uncached: expected shapes of as many new tokens"):
        attention.Sweep((SHAPE,), ("uncached",))


def test_every_case_is_measured_and_checked(take, without_cudnn):
    take(attention__1=6.0, attention=3.0, append_kv4=2.0, flush_kv4=0.5)
    sweep = attention.Sweep((SHAPE,), ("KV4",))
    rows = list(attention.run(sweep))
    assert len(rows) == sweep.cases == 1
    assert [(row["shape"], row["batch"], row["format"]) for row in rows] == [(SHAPE.name, 2, "KV4")]
    assert attention.failures(rows) == []
    for row in rows:
        # For each token of two sequences, and two heads: 64 codes and a word of 32 bits, for keys
        # and again for values.
        codes = 64 * int(row["format"][2:]) // 8
        assert row["cache_bytes"] == 2 * SHAPE.context * 2 * 2 * (codes + 4)
        assert row["microseconds"] == pytest.approx(11.5 / row["copies"])
        assert row["floor_microseconds"] == pytest.approx(11.5 / row["copies"])
        assert row["kernel_microseconds"]["attention"] == pytest.approx(9.0 / row["copies"])
        assert row["append_microseconds"] == 2.5
        assert row == attention.figures(row)


def test_prompts_are_measured_and_checked(take, without_cudnn, monkeypatch):
    take(attention=3.0)
    # Few enough that the checked ones are the last of a prompt, and not all of them.
    monkeypatch.setattr(attention, "CHECKED_QUERIES", 5)
    shapes = (dataclasses.replace(SHAPE, queries=24), AttentionShape(1, 2, 2, 64, 24, 24))
    rows = list(attention.run(attention.Sweep(shapes, ("KV8",))))
    assert attention.failures(rows) == []
    assert [row["append_microseconds"] for row in rows] == [None, None]
    assert [row["queries"] for row in rows] == [24, 24]
    # New tokens over cached ones take cuDNN two calls, each with arrays of its own.
    cached, new = (2 * 2 * 2 * keys * 2 * 64 for keys in (136, 24))
    expected = 3.0 / measure.copies(cached) + 3.0 / measure.copies(new)
    assert rows[0]["cudnn_microseconds"] == pytest.approx(expected)
    assert rows[1]["cudnn_microseconds"] == pytest.approx(3.0 / measure.copies(new // 2))


def test_prompts_attend_to_themselves_before_they_are_cached(take, without_cudnn, monkeypatch):
    take(attention=3.0)
    prompt = AttentionShape(1, 2, 2, 64, 24, 24)
    sweep = attention.Sweep((SHAPE, prompt), ("uncached", "KV16"))
    rows = list(attention.run(sweep))
    cases = [(row["shape"], row["format"]) for row in rows]
    assert cases == [(SHAPE.name, "KV16"), (prompt.name, "uncached"), (prompt.name, "KV16")]
    assert len(rows) == sweep.cases
    assert rows[1]["cache_bytes"] == 2 * 24 * 2 * 64 * 2
    assert attention.failures(rows) == []
    # An output of other queries must not pass.
    wrong = jax.random.normal(jax.random.key(7), (1, 24, 2, 64), "bfloat16")
    monkeypatch.setattr(attention, "prefill_attention", lambda *_: wrong)
    assert len(attention.failures(list(attention.run(sweep)))) == 1


def test_the_cache_is_full():
    pages, tables = attention.fill(SHAPE, KVFormat(16))
    assert tables.shape == (2, 2)
    written = jax.numpy.abs(pages.keys.astype("float32")).sum((1, 3))  # [pages, page size]
    assert (written > 0).sum() == SHAPE.batch * SHAPE.context


def test_one_sequence_is_longer_and_others_take_no_more_pages(take, without_cudnn):
    take(attention=3.0, append_kv8=1.0)
    shape = AttentionShape(3, 4, 2, 64, 130, longest=700)
    pages, tables = attention.fill(shape, KVFormat(16))
    assert tables.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 0, 0, 0, 0], [8, 9, 0, 0, 0, 0]]
    assert len(pages.keys) == 12  # as many for each
    written = jax.numpy.abs(pages.keys.astype("float32")).sum((1, 3)) > 0  # [pages, page size]
    assert written.sum(1).tolist() == [128] * 5 + [60] + [128, 2] * 2 + [0] * 2
    [row] = attention.run(attention.Sweep((shape,), ("KV8",)))
    assert (row["shape"], row["longest"]) == ("b3-h4/2-d64-c130-l700", 700)
    assert row["relative_error"] is not None
    assert attention.failures([row]) == []


def test_large_batches_are_not_checked():
    checked = {shape.name: attention.is_checked(shape) for shape in (*DECODE, *RAGGED)}
    assert all(checked[shape.name] for shape in DECODE)
    assert [checked[shape.name] for shape in RAGGED] == [True, False, False]
