"""Attention over latents: the reference against numpy, and the kernel against the reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVLayout, PagedKVCache, Span, append
from mpjax.kernels.attention.plans import AttentionConfig
from mpjax.kernels.device import Limits, described_as
from mpjax.kernels.kv_cache.reference import gather
from mpjax.kernels.latent.api import by_triton, latent_attention, latent_format
from mpjax.kernels.latent.plan import LatentProblem, plan_by_rule
from mpjax.kernels.masks import Masks
from tests.pallas_kernels.oracles import GATES, relative_error

FORMATS = ["KV16", "KV8", "KV4", "KV4t", "K8V16"]
# Nothing, one token, a full page, one token more, several pages.
LENGTHS = [0, 1, 16, 17, 75]
SCALE = 0.2


def scene(rng, text, dtype="float32", *, rank=64, rotary=32, heads=6, tokens=1, page_size=16):
    """Queries, pages with tokens of each sequence before the new ones and these, and a span."""
    batch, longest = len(LENGTHS), max(LENGTHS) + tokens
    layout = KVLayout(1, rank, latent_format(text), page_size, dtype, value_dim=rotary)
    cache = PagedKVCache.create(layout, layers=1, batch=batch, max_tokens=longest)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    counts = np.asarray([min(tokens, length) for length in LENGTHS], np.int32)
    starts = np.asarray(LENGTHS, np.int32) - counts
    # Pages that are no sequence's beginning, in another order.
    tables = jnp.asarray(rng.permutation(np.asarray(cache.block_tables).ravel()))
    tables = tables.reshape(cache.block_tables.shape)
    whole = Span(tables, np.zeros(batch, np.int32), np.asarray(LENGTHS, np.int32), fresh=True)
    latents = normal(batch, longest, 1, rank) + 1
    pages = append(cache.layers[0], latents, normal(batch, longest, 1, rotary), whole)
    queries, rotated = (normal(batch, tokens, heads, dim) for dim in (rank, rotary))
    return queries, rotated, pages, Span(tables, starts, counts)


def expected(arrays, span):
    """The same in float64, from what the pages decode to."""
    queries, rotated, pages = arrays
    latents, rotary = (np.asarray(x, np.float64)[:, :, 0] for x in gather(pages, span.block_tables))
    queries, rotated = (np.asarray(x, np.float64) for x in (queries, rotated))
    out = np.zeros(queries.shape)
    for b, (start, count) in enumerate(zip(span.starts, span.counts, strict=True)):
        for t in range(count):
            end = start + t + 1
            scores = queries[b, t] @ latents[b, :end].T + rotated[b, t] @ rotary[b, :end].T
            weights = np.exp(SCALE * scores - (SCALE * scores).max(-1, keepdims=True))
            out[b, t] = weights / weights.sum(-1, keepdims=True) @ latents[b, :end]
    return out


def real(out, span):
    """Zeros in the place of padding."""
    is_real = np.arange(out.shape[1])[None] < np.asarray(span.counts)[:, None]
    return np.where(is_real[..., None, None], np.asarray(out, np.float64), 0)


def run_kernel(queries, rotated, pages, span, *, splits=3, tile_rows=8):
    config = AttentionConfig(tile_rows, 32, splits, 4, 2)
    span = span.read("test", queries.shape[:-2])

    @jax.jit
    def run(queries, rotated, pages, span):
        masks = Masks(SCALE)
        return by_triton(queries, rotated, pages, span, masks, config, interpret=True)

    return run(queries, rotated, pages, span)


@pytest.mark.parametrize("text", FORMATS)
def test_the_reference_is_what_the_pages_hold(text, rng):
    *arrays, span = scene(rng, text, tokens=3)
    out = latent_attention(*arrays, span, scale=SCALE)
    np.testing.assert_allclose(real(out, span), expected(arrays, span), atol=2e-5)


def test_varlen_tokens_see_what_padded_ones_do(rng):
    queries, rotated, pages, span = scene(rng, "KV8", tokens=3)
    padded = real(latent_attention(queries, rotated, pages, span, scale=SCALE), span)

    def flat(x):
        return np.concatenate([x[b, :count] for b, count in enumerate(span.counts)])

    out = latent_attention(flat(queries), flat(rotated), pages, span, scale=SCALE)
    rows = flat(padded)
    np.testing.assert_allclose(out, rows, atol=2e-5)


@pytest.mark.parametrize(
    ("text", "dtype", "tokens", "rank", "tile_rows", "splits"),
    [
        ("KV16", "bfloat16", 1, 256, 8, 3),
        ("KV8", "float16", 1, 64, 16, 1),
        ("KV8", "bfloat16", 1, 64, 8, 2),
        ("KV4", "bfloat16", 3, 128, 32, 2),
        ("K8V16", "bfloat16", 1, 64, 8, 1),
    ],
)
def test_the_kernel(text, dtype, tokens, rank, tile_rows, splits, rng):
    *arrays, span = scene(rng, text, dtype, tokens=tokens, rank=rank, page_size=32)
    out = run_kernel(*arrays, span, splits=splits, tile_rows=tile_rows)
    assert relative_error(real(out, span), expected(arrays, span)) < GATES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("text", "heads"), [*zip(FORMATS, (16, 20, 32, 128, 7), strict=True)])
def test_the_kernel_on_the_gpu(text, heads, dtype, rng):
    *arrays, span = scene(rng, text, dtype, rank=512, rotary=64, heads=heads, tokens=2)
    out = jax.jit(
        lambda *arrays: latent_attention(*arrays, span, scale=SCALE, implementation="triton")
    )(*arrays)
    assert relative_error(real(out, span), expected(arrays, span)) < GATES[dtype]


@pytest.mark.parametrize(("text", "heads"), [("KV16", 16), ("KV8", 128), ("KV4", 20)])
def test_it_is_lowered_for_a_gpu(text, heads, rng, lower_for_cuda):
    """With the tokens that are appended before, by the kernel of all pages."""
    *arrays, span = scene(rng, text, "bfloat16", rank=512, rotary=64, heads=heads)

    def step(queries, rotated, pages):
        pages = append(pages, queries[:, :, :1], rotated[:, :, :1], span)
        return latent_attention(queries, rotated, pages, span, scale=SCALE)

    with described_as():
        lowered = lower_for_cuda(step, *arrays)
    assert all(name in lowered for name in ("latent_attention_", "append_"))


def test_programs_fill_the_gpu_once():
    limits = Limits(132, 9.0)
    for batch, tokens, heads in ((8, 8192, 16), (64, 4096, 16), (8, 8192, 128), (1, 4096, 20)):
        for bits, size in ((16, 1152), (4, 588)):
            config = plan_by_rule(LatentProblem(batch, heads, tokens, size, bits), limits)
            programs = batch * -(-heads // config.tile_rows) * config.splits
            assert programs <= 2 * 132 or config.splits == 1
            tiles = (config.stages - 1) * config.tile_keys * size
            assert 2 * tiles <= limits.shared_memory
            assert config.tile_keys == {16: 32, 4: 64}[bits]


def test_wrong_arguments_are_named(rng):
    queries, rotated, pages, span = scene(rng, "KV16")
    with pytest.raises(ValueError, match=r"rotated \(5, 1, 6, 16\): expected .*\[\.\.\., 32\]"):
        latent_attention(queries, rotated[..., :16], pages, span, scale=1.0)
    with pytest.raises(ValueError, match="KV4c: a latent is kept in 16, 8 or 4 bits"):
        latent_format("KV4c")
    two = dataclasses.replace(pages, keys=jnp.concatenate([pages.keys] * 2, 1))
    with pytest.raises(ValueError, match="2 heads in KV16: expected one head"):
        latent_attention(queries, rotated, two, span, scale=1.0)
