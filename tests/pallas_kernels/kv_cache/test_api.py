from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, Span, UnsupportedError, append, device
from mpjax.kernels.kv_cache import api, reference, triton
from tests.pallas_kernels.kv_cache.pages import assert_same_bits, ragged_append, random_pages
from tests.pallas_kernels.oracles import as_array, relative_error
from tests.sweeps import in_sweep


def pages_of(rng, bits=8, dtype="bfloat16", head_dim=64):
    return random_pages(
        rng, KVFormat(bits), pages=8, kv_heads=2, page_size=64, head_dim=head_dim, dtype=dtype
    )


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_implementations_agree(implementation, rng, interpreted_triton):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 2, "bfloat16")
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize("dtype", ["int16", "int64"])
def test_places_are_integers_of_any_size(dtype, rng, interpreted_triton):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 2, "bfloat16")
    keys, values, span = new.arrays()
    with jax.enable_x64(True):
        span = jax.tree.map(lambda array: jnp.asarray(array, dtype), span)
        written = jax.jit(functools.partial(append, implementation="triton"))(
            pages, keys, values, span
        )
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize(("implementation", "longest"), [("triton", 3), ("reference", None)])
def test_tokens_can_be_varlen(implementation, longest, rng, interpreted_triton):
    """Four of them, of which one adds nothing and one runs past its end, and then padding."""
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 3, "bfloat16")
    keys, values = (
        jnp.asarray(np.concatenate([*(x[b, :n] for b, n in enumerate(new.counts)), x[0, :2]]))
        for x in (new.keys, new.values)
    )
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write)(pages, keys, values, dataclasses.replace(new.span(), longest=longest))
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((4, 1, 3, 64), (4, 1, 3, 64)),
        ((4, 1, 2, 32), (4, 1, 2, 32)),
        ((4, 1, 2, 64), (4, 2, 2, 64)),
        ((4, 3, 64), (4, 3, 64)),
        ((2, 64), (2, 64)),
    ],
)
def test_keys_and_values_must_fit_the_pages(keys, values, rng):
    span = Span(jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32))
    message = r"must be \[batch, tokens, 2, 64\], the KV heads and head dimension of the pages"
    with pytest.raises(ValueError, match=message):
        append(pages_of(rng), jnp.zeros(keys), jnp.zeros(values), span)


def test_unknown_implementations_are_refused(rng):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 1, "bfloat16")
    with pytest.raises(ValueError, match="append: unknown implementation 'xla'"):
        append(pages, *new.arrays(), implementation="xla")  # type: ignore[arg-type]


def test_the_kernel_needs_a_gpu(rng, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 1, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"append: .*'triton'.*there is no GPU"):
        append(pages, *new.arrays(), implementation="triton")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 16, "dtype": "float32"}, "pages of float32 are not 16 bits wide"),
        ({"head_dim": 80}, "head dimension 80 is not one of (64, 96, 128, 256)"),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_the_reference(changes, reason, rng, pretend_gpu):
    pages = pages_of(rng, **changes)
    new = ragged_append(rng, pages, 2, changes.get("dtype", "bfloat16"))
    assert api.why_not_triton(pages) == reason
    written = jax.jit(append)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        append(pages, *new.arrays(), implementation="triton")


@pytest.mark.parametrize("supported", [True, False])
def test_the_kernel_is_chosen_where_it_can_run(supported, rng, monkeypatch):
    reason = None if supported else "there is no GPU"
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: reason)
    monkeypatch.setattr(triton, "append", lambda *_: "triton")
    monkeypatch.setattr(reference, "append", lambda *_: "reference")
    pages = pages_of(rng)
    chosen: object = append(pages, *ragged_append(rng, pages, 1, "bfloat16").arrays())
    assert chosen == ("triton" if supported else "reference")


def test_tokens_one_at_a_time_equal_all_at_once(rng, trace_counter):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 4, "bfloat16")
    keys, values, span = new.arrays()
    counted = trace_counter(append)
    step = jax.jit(counted, donate_argnums=0)
    expected = new.oracle(pages)
    for token in range(4):
        chosen = slice(token, token + 1)
        more = (span.counts > token).astype(jnp.int32)
        one = Span(span.block_tables, span.starts + token, more)
        pages = step(pages, keys[:, chosen], values[:, chosen], one)
    assert counted.count == 1
    assert_same_bits(pages, expected)
    assert np.asarray(span.counts).tolist() == [4, 0, 3, 4]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("text", "dtype", "of_keys", "implementation"),
    [
        in_sweep("KV8", "bfloat16", "float16", "triton"),
        ("KV8", "float16", "float32", "reference"),
        ("KV4c", "bfloat16", "float16", "triton"),
        ("KV4c", "float16", "bfloat16", "reference"),
    ],
)
def test_scales_have_the_dtype_of_the_cache(
    text, dtype, of_keys, implementation, rng, interpreted_triton
):
    """Whatever that of keys and values is; of the two blocks that there are, one waits."""
    cache = PagedKVCache.create(
        KVLayout(1, 64, KVFormat.parse(text), dtype=dtype), layers=1, batch=1, max_tokens=256
    )
    new = rng.standard_normal((2, 1, 130, 1, 64))
    write = functools.partial(append, implementation=implementation)
    span = Span(cache.block_tables, jnp.zeros(1, jnp.int32), jnp.full(1, 130, jnp.int32))
    keys, values = as_array(new, of_keys)
    pages = jax.jit(write)(cache.layers[0], keys, values, span)
    assert jax.tree.structure(pages) == jax.tree.structure(cache.layers[0])
    found = jax.jit(reference.gather)(pages, cache.block_tables, jnp.full(1, 130, jnp.int32))
    for side, expected in zip(found, new, strict=True):
        assert relative_error(side[:, :130], expected) < (0.15 if text == "KV4c" else 0.01)


def span_of(batch, *, tables=None, starts=None, counts=None, dtype="int32"):
    """A span, some of whose arrays are of other batches."""
    return Span(
        jnp.zeros((batch if tables is None else tables, 2), "int32"),
        jnp.zeros(batch if starts is None else starts, dtype),
        jnp.ones(batch if counts is None else counts, "int32"),
    )


WRONG_SPANS = [
    (span_of(4, starts=1), r"starts is int32 of shape \(1,\): expected int32 \[batch\], and the"),
    (span_of(4, counts=5), r"counts is int32 of shape \(5,\): expected .* block_tables is 4"),
    (span_of(4, dtype="float32"), r"starts is float32 of shape \(4,\): expected int32"),
    (
        dataclasses.replace(span_of(4), block_tables=jnp.zeros(4, "int32")),
        r"block_tables is int32 of shape \(4,\): exp",
    ),
]


@pytest.mark.parametrize(
    ("span", "message"),
    [*WRONG_SPANS, (span_of(3), "append: tokens are of a batch of 4: expected 3, that of bloc")],
)
def test_a_span_is_that_of_the_tokens(span, message, rng):
    """Also of varlen ones, but for the batch that these don't have."""
    pages, new = pages_of(rng), jnp.zeros((4, 1, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        append(pages, new, new, span)
    if "tokens" in message:
        jax.eval_shape(append, pages, new[:, 0], new[:, 0], span)
        return
    with pytest.raises(ValueError, match=message):
        append(pages, new[:, 0], new[:, 0], span)


def test_a_residual_is_that_of_the_batch(rng):
    pages = random_pages(
        rng, KVFormat("2t"), pages=8, kv_heads=2, page_size=64, head_dim=64, dtype="bfloat16"
    )
    new = jnp.zeros((3, 1, 2, 64), jnp.bfloat16)
    message = "append: the pages' residual is of a batch of 4: expected 3, that of block_tables"
    with pytest.raises(ValueError, match=message):
        append(pages, new, new, span_of(3))


@pytest.mark.parametrize(
    ("starts", "counts", "message"),
    [
        ([-1, 0], [1, 1], r"starts are \[-1, 0\]: expected 0 or above"),
        ([0, 0], [4, 1], r"counts are \[4, 1\]: expected 0 to 3, the new tokens"),
        ([0, 0], [-2, 1], r"counts are \[-2, 1\]: expected 0 to 3"),
    ],
)
def test_starts_and_counts_are_those_of_tokens(starts, counts, message, rng):
    """Where they are known."""
    pages, new = pages_of(rng), jnp.zeros((2, 3, 2, 64), jnp.bfloat16)
    arrays = (np.asarray(x, np.int32) for x in (starts, counts))
    span = Span(jnp.zeros((2, 2), jnp.int32), *arrays)
    with pytest.raises(ValueError, match=f"append: {message}"):
        append(pages, new, new, span)
    with pytest.raises(ValueError, match=f"append: {message}"):
        append(pages, new[0], new[0], span)
    jax.eval_shape(append, pages, new, new, span)


def test_varlen_sequences_have_no_more_than_all_tokens(rng):
    pages, new = pages_of(rng), jnp.zeros((3, 2, 64), jnp.bfloat16)
    tables, starts = jnp.zeros((2, 2), jnp.int32), np.zeros(2, np.int32)
    append(pages, new, new, Span(tables, starts, np.array([1, 2], np.int32)))
    with pytest.raises(ValueError, match=r"counts are \[3, 3\]: .*0 to 3, .*more than 3 in all"):
        append(pages, new, new, Span(tables, starts, np.array([3, 3], np.int32)))


@pytest.mark.parametrize("side", [0, 1])
def test_integers_are_no_keys_and_values(side, rng):
    new = [jnp.zeros((4, 1, 2, 64), jnp.bfloat16)] * 2
    new[side] = new[side].astype(jnp.int32)
    with pytest.raises(
        ValueError, match=r"append: (keys|values) has the dtype int32: expected floa"
    ):
        append(pages_of(rng), *new, span_of(4))
