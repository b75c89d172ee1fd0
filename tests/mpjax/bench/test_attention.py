from __future__ import annotations

import dataclasses

import jax
import pytest

from mpjax.bench import attention, measure
from mpjax.kernels import KVFormat
from mpjax.kernels.attention.shapes import DECODE, PREFILL, RAGGED, AttentionShape

SHAPE = AttentionShape(2, 4, 2, 64, 160)


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


def test_latents_are_measured_against_their_bytes(take):
    take(latent_attention=6.0, append_k8v8=2.0)
    shape = AttentionShape(2, 4, 1, 64, 256, rotary=32)
    assert attention.named([shape.name]) == (shape,)
    with pytest.raises(
        ValueError, match=r"the latents of 'b1-h2/2-d64\+32-c16' are of one KV head"
    ):
        attention.named(["b1-h2/2-d64+32-c16"])
    [row] = attention.run(attention.Sweep((shape,), ("KV8",)))
    assert attention.failures([row]) == []
    assert row["cache_bytes"] == 2 * 256 * (64 + 32 + 2 * 4)
    assert row["cudnn_microseconds"] is None
    products = 2 * 4 * (64 + 32 + 64) * 256
    assert row["teraflops"] == pytest.approx(2 * products / row["microseconds"] / 1e6)


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
