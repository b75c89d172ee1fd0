from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks, UnsupportedError, paged_attention, prefill_attention
from mpjax.kernels.attention import cudnn, reference, triton
from mpjax.kernels.kv_cache import hadamard
from mpjax.kernels.kv_cache.api import HEAD_DIMS
from tests.pallas_kernels.attention.scenes import scene, sinks_of
from tests.pallas_kernels.oracles import (
    GATES,
    as_array,
    random_array,
    relative_error,
    softmax_attention,
    wide,
)

DECODE: dict[str, Any] = {"starts": [70, 0], "counts": [1, 1]}


@pytest.mark.parametrize(
    ("implementation", "transformed"),
    [("triton", False), ("reference", False), ("reference", True)],
)
def test_implementations_agree(implementation, transformed, rng, interpreted_triton):
    """Keys went through a Hadamard transform; queries may have done so before, or do here."""
    test = scene(rng, "KV4", "float16", **DECODE)
    queries, *others = test.arguments
    attend = functools.partial(
        paged_attention, implementation=implementation, transformed=transformed
    )
    queries = hadamard.transform(queries) if transformed else queries
    out = jax.jit(attend)(queries, *others, Masks(window=50))
    assert test.error(out, window=50) < GATES["float16"]


@pytest.mark.parametrize(
    ("implementation", "longest"), [("triton", None), ("triton", 20), ("reference", None)]
)
def test_tokens_can_be_varlen(implementation, longest, rng, interpreted_triton):
    """A prompt, one token, nothing, a continuation across a page; and tokens of no sequence."""
    lengths: dict[str, Any] = {"starts": [0, 70, 9, 50], "counts": [13, 1, 0, 20]}
    test = scene(rng, "KV8", "float16", heads=(2, 3), **lengths)
    masks = {"window": 30, "sinks": sinks_of(rng, 6)}
    attend = functools.partial(paged_attention, implementation=implementation)
    queries = test.varlen_queries(padding=2)
    span = dataclasses.replace(test.span, longest=longest)
    out = jax.jit(attend)(queries, test.pages, span, Masks(**masks))
    assert out.shape == queries.shape
    assert test.error(test.padded(out), **masks) < GATES["float16"]


@pytest.mark.parametrize("shape", [(2, 1, 3, 64), (2, 1, 4, 32), (2, 3, 64), (4, 64), (64,), ()])
def test_queries_must_fit_the_pages(shape, rng):
    test = scene(rng, "KV16", "float32", **DECODE)
    message = (
        r"must be .*, or varlen \[tokens, query heads, 64\], with query heads a multiple of the 2"
    )
    with pytest.raises(ValueError, match=message):
        paged_attention(jnp.zeros(shape), *test.arguments[1:])


@pytest.mark.parametrize(
    ("text", "dtype", "head_dim", "reason"),
    [
        ("KV8", "float32", 64, "queries are float32, expected bfloat16 or float16"),
        ("KV16", "float16", 72, "head dimension 72 is not one of"),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_the_reference(
    text, dtype, head_dim, reason, rng, pretend_gpu
):
    test = scene(rng, text, dtype, head_dim=head_dim, **DECODE)
    out = jax.jit(paged_attention)(*test.arguments)
    assert test.error(out) < GATES["float16"]
    with pytest.raises(UnsupportedError, match=reason):
        paged_attention(*test.arguments, implementation="triton")


def prefill_error(dtype: str, rng: np.random.Generator, *, dim: int = 64, **options: Any) -> float:
    queries = random_array(rng, (2, 33, 4, dim), dtype)
    keys, values = (random_array(rng, (2, 33, 2, dim), dtype) for _ in range(2))
    masks = {name: value for name, value in options.items() if name != "implementation"}
    attend = functools.partial(prefill_attention, implementation=options.get("implementation"))
    out = jax.jit(attend)(queries, keys, values, Masks(**masks))
    assert out.dtype == queries.dtype
    expected = softmax_attention(
        wide(queries),
        wide(keys),
        wide(values),
        np.broadcast_to(np.arange(33), (2, 33)),
        np.full(2, 33),
        options.get("scale", dim**-0.5),
        **{name: options.get(name) for name in ("window", "softcap", "sinks", "chunked")},
    )
    return relative_error(out, expected)


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        (None, {}),
        ("xla", {}),
        ("xla", {"window": 1}),
        ("xla", {"window": 10, "scale": 0.3}),
        ("reference", {"window": 10, "scale": 0.3}),
        ("reference", {"window": 10, "chunked": True}),
        ("xla", {"window": 10, "chunked": True}),
    ],
)
def test_prefill(implementation, options, rng):
    assert prefill_error("float32", rng, implementation=implementation, **options) < 1e-5


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("masked", [True, False])
def test_prefill_with_softcap_and_sinks(implementation, masked, rng, interpreted_triton):
    """33 tokens leave a page of 64 partly empty."""
    options: dict[str, Any] = {"scale": 0.3}
    if masked:
        options |= {"window": 10, "softcap": 1.5, "sinks": sinks_of(rng, 4)}
    error = prefill_error("float16", rng, implementation=implementation, **options)
    assert error < GATES["float16"]


def test_masks_are_arguments_of_jit(rng, trace_counter):
    """Their numbers are static; other sinks trace nothing anew."""
    test = scene(rng, "KV16", "float32", **DECODE)
    counted = trace_counter(paged_attention)
    attend = jax.jit(counted)
    for number in range(2):
        masks = {"window": 20, "softcap": 2.0, "sinks": sinks_of(rng, 4)}
        assert test.error(attend(*test.arguments, Masks(**masks)), **masks) < 1e-5, number
    assert counted.count == 1
    assert test.error(attend(*test.arguments, Masks(window=9)), window=9) < 1e-5
    assert counted.count == 2


@pytest.mark.parametrize("text", ["KV8", "KV4c"])
@pytest.mark.parametrize(
    ("dtype", "of_queries"),
    [("bfloat16", "float16"), ("float16", "bfloat16"), ("bfloat16", "float32")],
)
def test_queries_of_another_dtype_than_the_scales(text, dtype, of_queries, rng, pretend_gpu):
    """The reference gives what is right, and the kernel says what there should be."""
    test = scene(rng, text, dtype, **DECODE)
    test = dataclasses.replace(test, queries=as_array(wide(test.queries), of_queries))
    reason = f"the pages are for {dtype} queries and these are {of_queries}: create the cache with"
    if of_queries == "float32":
        reason = "queries are float32, expected bfloat16 or float16"
    with pytest.warns(UserWarning, match=f"paged_attention runs as plain JAX .*: {reason}") as seen:
        out = jax.jit(paged_attention)(*test.arguments)
    assert test.error(out) < GATES["bfloat16"]
    assert [warning.filename for warning in seen] == [__file__]
    with pytest.raises(UnsupportedError, match=reason):
        paged_attention(*test.arguments, implementation="triton")


def test_shapes_of_a_prompt_must_fit():
    x = jnp.zeros((1, 4, 2, 8))
    message = r"must be \[batch, tokens, KV heads, head dim\], of as many tokens as queries \(1, 4,"
    for keys, values in ((x[:, :3], x[:, :3]), (x, x[:, :3]), (x, x[:, :, :1]), (x[0], x[0])):
        with pytest.raises(ValueError, match=message):
            prefill_attention(x, keys, values)


@pytest.mark.parametrize(
    ("dtype", "dim", "softcap", "expected"),
    [
        ("bfloat16", 128, None, "cudnn"),
        ("float16", 96, None, "cudnn"),
        ("bfloat16", 128, 30.0, "triton"),
        ("bfloat16", 256, None, "triton"),
        ("bfloat16", 192, None, "triton"),
        ("float16", 208, None, "xla"),
        ("float32", 64, None, "xla"),
        ("float32", 64, 30.0, "reference"),
    ],
)
@pytest.mark.filterwarnings("ignore:prefill_attention runs as plain JAX")
def test_the_gpu_implementation_of_prefill_is_chosen_by_dtype_size_and_masks(
    dtype, dim, softcap, expected, monkeypatch, pretend_gpu
):
    chosen = []

    def attention(queries, *_, implementation, **__):
        chosen.append(implementation)
        return queries

    def choose(name):
        return lambda queries, *_, **__: attention(queries, implementation=name)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    monkeypatch.setattr(triton, "paged_attention", choose("triton"))
    monkeypatch.setattr(reference, "attention", choose("reference"))
    x = jnp.zeros((1, 4, 2, dim), dtype)
    prefill_attention(x, x, x, Masks(softcap=softcap))
    assert chosen == [expected]


def test_cudnn_gets_an_even_number_of_tokens(monkeypatch, pretend_gpu, rng):
    seen, plain = [], jax.nn.dot_product_attention

    def attention(queries, *others, implementation, **options):
        seen.append((implementation, queries.shape[1]))
        return plain(queries, *others, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = jnp.asarray(rng.standard_normal((2, 5, 2, 64)), jnp.bfloat16)
    found = prefill_attention(x, x, x)
    assert seen == [("cudnn", 6)]
    expected = prefill_attention(x, x, x, implementation="reference")
    assert found.shape == expected.shape
    error = relative_error(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert error < GATES["bfloat16"]


@pytest.mark.gpu
def test_derivatives_of_an_odd_number_of_tokens_on_the_gpu(rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 2, 64)), jnp.bfloat16)

    def loss(x, implementation=None):
        found = prefill_attention(x, x, x, implementation=implementation)
        return (found.astype(jnp.float32) ** 2).sum()

    found, expected = (
        np.asarray(jax.grad(loss)(x, name), np.float32) for name in ("cudnn", "reference")
    )
    assert relative_error(found, expected) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 10, "scale": 0.3}, {"window": 10, "chunked": True}],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prefill_on_the_gpu(dtype, options, rng):
    for implementation, dim in ((None, 96), (None, 128), (None, 256), ("xla", 128), ("triton", 64)):
        error = prefill_error(dtype, rng, dim=dim, implementation=implementation, **options)
        assert error < GATES[dtype], f"{implementation}, {dim} channels"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prefill_with_softcap_and_sinks_on_the_gpu(dtype, rng):
    options: dict[str, Any] = {"softcap": 1.5, "sinks": sinks_of(rng, 4)}
    for dim in HEAD_DIMS:
        assert prefill_error(dtype, rng, dim=dim, **options) < GATES[dtype], f"{dim} channels"
        assert prefill_error(dtype, rng, dim=dim, window=10, **options) < GATES[dtype], f"{dim}"


@pytest.mark.parametrize(
    ("implementation", "dtype", "dim", "reason"),
    [
        ("cudnn", "float32", 64, "queries are float32, expected bfloat16 or float16"),
        ("cudnn", "bfloat16", 100, "heads of 100 channels are no multiple of 8 up to 128"),
        ("cudnn", "bfloat16", 256, "heads of 256 channels are no multiple of 8 up to 128"),
        ("triton", "float32", 64, "queries are float32, expected bfloat16 or float16"),
        ("triton", "bfloat16", 72, "head dimension 72 is not one of"),
    ],
)
def test_prefill_says_what_it_cannot_do(implementation, dtype, dim, reason, pretend_gpu):
    x = jnp.ones((1, 4, 2, dim), dtype)
    message = f"prefill_attention: '{implementation}' can't run: {reason}"
    with pytest.raises(UnsupportedError, match=message):
        prefill_attention(x, x, x, implementation=implementation)


def test_long_prompts_say_that_this_jax_keeps_them_from_cudnn(monkeypatch, pretend_gpu, rng):
    monkeypatch.setattr(cudnn, "dot_product_attention", None)
    monkeypatch.setattr(triton, "paged_attention", lambda queries, *_, **__: queries)
    test = scene(rng, "KV8", "bfloat16", **DECODE)
    queries, *rest = test.arguments
    paged_attention(queries, *rest)  # short: cuDNN would not be asked
    long = jnp.zeros((queries.shape[0], cudnn.LEAST_TOKENS, *queries.shape[2:]), queries.dtype)
    paged_attention(long, *rest, Masks(window=100))  # nor for what it can't do anywhere
    paged_attention(long[0], *rest)
    with pytest.warns(UserWarning, match=r"long prompts over a cache take longer: JAX .* has no"):
        paged_attention(long, *rest)
