"""Attention without the kernel: in plain jnp, and by cuDNN."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks, UnsupportedError, device, paged_attention
from mpjax.kernels.attention import cudnn, reference, triton
from mpjax.kernels.kv_cache import hadamard
from tests.pallas_kernels.attention.scenes import scene, sinks_of
from tests.pallas_kernels.oracles import (
    GATES,
    random_array,
    relative_error,
    softmax_attention,
    wide,
)
from tests.sweeps import combinations

SCALE = 0.125

attention = jax.jit(reference.attention)
attend = jax.jit(reference.paged_attention)


def paged(*arguments, **masks):
    return attend(*arguments, Masks(SCALE, **masks))


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 7), (2, 2)])
def test_attention(kv_heads, group, window, rng):
    queries = random_array(rng, (3, 6, kv_heads * group, 16), "float32")
    keys, values = (random_array(rng, (3, 20, kv_heads, 16), "float32") for _ in range(2))
    positions = np.array([[0], [5], [14]], np.int32) + np.arange(6, dtype=np.int32)
    lengths = np.array([6, 3, 20], np.int32)
    out = attention(
        queries,
        keys,
        values,
        jnp.asarray(positions),
        jnp.asarray(lengths),
        Masks(SCALE, window),
    )
    expected = softmax_attention(
        wide(queries), wide(keys), wide(values), positions, lengths, SCALE, window
    )
    assert relative_error(out, expected) < 1e-6
    # A row without a key, which the window makes, is zero in both.
    np.testing.assert_array_equal(np.asarray(out)[expected == 0], 0)


@pytest.mark.parametrize("text", ["KV16", "KV8", "K4Vfp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_paged_attention(text, dtype, rng):
    test = scene(rng, text, dtype, starts=[0, 37, 60, 0], counts=[7, 1, 5, 0], heads=(2, 3))
    gate = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for window in (None, 6):
        out = paged(*test.arguments, window=window)
        assert test.error(out, SCALE, window=window) < gate
    np.testing.assert_array_equal(np.asarray(out[3]), 0)


def test_gradients_are_numbers_even_where_nothing_is_visible(rng):
    keys = random_array(rng, (2, 5, 1, 8), "float32")
    positions, lengths = jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.array([0, 3])

    def total(keys):
        return reference.attention(keys, keys, keys, positions, lengths, Masks(1.0)).sum()

    gradient = np.asarray(jax.jit(jax.grad(total))(keys))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.abs(gradient[1]).max() > 0


CHUNKS = {"starts": [0, 200, 130], "counts": [40, 33, 1], "page_size": 64}


def plain(queries, keys, values, lengths, scale):
    """`Attend` in float32; as cuDNN's, no number where nothing is seen."""
    repeated = (jnp.repeat(x, queries.shape[2] // x.shape[2], 2) for x in (keys, values))
    q, k, v = (x.astype(jnp.float32) for x in (queries, *repeated))
    scores = jnp.einsum("bthd,bshd->bths", q, k) * scale
    key = jnp.arange(k.shape[1])
    if lengths is None:
        seen = (key[None] <= jnp.arange(q.shape[1])[:, None])[None]  # [1, tokens, keys]
    else:
        seen = (key[None] < lengths[:, None])[:, None]  # [batch, 1, keys]
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    out = jnp.einsum("bths,bshd->bthd", jax.nn.softmax(scores), v)
    return out.astype(queries.dtype), jax.nn.logsumexp(scores, -1)


@pytest.mark.one_of(3)
@combinations(1, text=["KV16", "KV8", "KV4", "KV4c", "K8V2"], dtype=["bfloat16", "float16"])
def test_old_and_new_tokens_are_joined(text, dtype, rng):
    test = scene(rng, text, dtype, **CHUNKS)
    queries, *rest = test.arguments
    if test.pages.format.key_codes.hadamard:
        queries = hadamard.transform(queries)
    run = functools.partial(cudnn.paged_attention, scale=64**-0.5, attend=plain)
    out = jax.jit(run)(queries, *rest)
    assert test.error(out) < GATES[dtype]


@pytest.mark.parametrize(
    ("text", "dtype", "head_dim", "scratch", "reason"),
    [
        ("KV8", "bfloat16", 64, 1 << 30, None),
        ("KV8", "float32", 64, 1 << 30, "queries are float32"),
        ("KV8", "bfloat16", 256, 1 << 30, "heads of 256 channels are no multiple of 8 up to 128"),
        ("KV8", "bfloat16", 100, 1 << 30, "heads of 100 channels are no multiple of 8 up to 128"),
        ("KV8", "bfloat16", 64, 1000, "the cache would fill 393216 bytes, more than 1000"),
    ],
)
def test_what_it_can_do(text, dtype, head_dim, scratch, reason, rng, pretend_gpu, monkeypatch):
    monkeypatch.setattr(cudnn, "MOST_SCRATCH_BYTES", scratch)
    test = scene(rng, text, dtype, head_dim=head_dim, **CHUNKS)
    found = cudnn.why_not(test.queries, test.pages, test.span)
    assert found is None if reason is None else reason in str(found)
    assert "varlen" in str(cudnn.why_not(test.queries[0], test.pages, test.span))
    monkeypatch.setattr(device, "compute_capability", lambda: 7.5)
    found = cudnn.why_not(test.queries, test.pages, test.span)
    assert found == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(cudnn, "dot_product_attention", None)
    assert "no cuDNN" in str(cudnn.why_not(test.queries, test.pages, test.span))


def test_many_new_tokens_without_masks_choose_it(rng, pretend_gpu, monkeypatch):
    chosen = []
    for module, name in ((cudnn, "cudnn"), (triton, "triton")):

        def note(queries, *_, name=name, **__):
            chosen.append(name)
            return queries

        monkeypatch.setattr(module, "paged_attention", note)
    test = scene(rng, "KV8", "bfloat16", **CHUNKS)
    rest = test.arguments[1:]
    monkeypatch.setattr(cudnn, "LEAST_TOKENS", 40)
    paged_attention(test.queries, *rest)
    fewer = test.moved(counts=np.minimum(test.span.counts, 39))
    short = test.queries[:, :39], *fewer.arguments[1:]
    paged_attention(*short)
    paged_attention(test.queries, *rest, Masks(window=7))
    paged_attention(test.queries, *rest, implementation="triton")
    paged_attention(*short, implementation="cudnn")
    assert chosen == ["cudnn", "triton", "triton", "triton", "cudnn"]
    masks = Masks(sinks=sinks_of(rng, 4))
    with pytest.raises(UnsupportedError, match="'cudnn' can't run: it knows no window"):
        paged_attention(test.queries, *rest, masks, implementation="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4", "KV4c"])
def test_on_the_gpu(text, dtype, rng):
    places = {"starts": [0, 1000, 77], "counts": [600, 513, 1]}
    for head_dim in (64, 128):
        test = scene(rng, text, dtype, head_dim=head_dim, **places)
        out = jax.jit(functools.partial(paged_attention, implementation="cudnn"))(*test.arguments)
        assert test.error(out) < GATES[dtype]
        assert np.isfinite(np.asarray(out, np.float32)).all()


def test_gradients_beside_a_large_sink_are_numbers(rng):
    """e to the power of a sink of 200 is beyond float32, and leaves its head's keys no weight."""
    queries, keys, values = (random_array(rng, (1, 5, 2, 8), "float32") for _ in range(3))
    positions, lengths = jnp.arange(5)[None], jnp.array([5])

    def total(queries, keys, values, sinks=None):
        masks = Masks(1.0, sinks=sinks)
        out = reference.attention(queries, keys, values, positions, lengths, masks)
        return (out @ jnp.arange(8.0)).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    *found, of_sinks = gradients(queries, keys, values, jnp.array([200.0, -200.0]))
    without = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(queries, keys, values)
    for gradient, expected in zip(found, without, strict=True):
        np.testing.assert_array_equal(gradient[:, :, 0], 0)
        np.testing.assert_allclose(gradient[:, :, 1], expected[:, :, 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_sinks, 0)
