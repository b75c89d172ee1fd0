from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks, UnsupportedError, device, paged_attention
from mpjax.kernels.attention import cudnn, reference, triton
from mpjax.kernels.kv_cache import hadamard
from tests.pallas_kernels.attention.scenes import scene, sinks_of
from tests.pallas_kernels.oracles import GATES
from tests.sweeps import combinations

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


def test_heads_that_no_kernel_takes_may_be_cudnns(rng, pretend_gpu, monkeypatch):
    """Without the warning that it would be slow; fewer tokens go to the reference, with it."""
    chosen = []
    for module, name in ((cudnn, "cudnn"), (reference, "reference")):

        def note(queries, *_, name=name, **__):
            chosen.append(name)
            return queries

        monkeypatch.setattr(module, "paged_attention", note)
    monkeypatch.setattr(cudnn, "LEAST_TOKENS", 40)
    test = scene(rng, "KV8", "bfloat16", head_dim=80, **CHUNKS)
    rest = test.arguments[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged_attention(test.queries, *rest)
    fewer = test.moved(counts=np.minimum(test.span.counts, 39))
    with pytest.warns(UserWarning, match="head dimension 80 is not one of"):
        paged_attention(test.queries[:, :39], *fewer.arguments[1:])
    assert chosen == ["cudnn", "reference"]


def test_it_needs_a_gpu(rng):
    test = scene(rng, "KV8", "bfloat16", **CHUNKS)
    with pytest.raises(UnsupportedError, match="cuDNN needs a CUDA GPU"):
        paged_attention(*test.arguments, implementation="cudnn")


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
