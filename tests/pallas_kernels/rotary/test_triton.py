from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import HeadNorms, KVFormat, KVLayout, PagedKVCache, Rotation, Span
from mpjax.kernels.rotary import reference, triton
from tests.pallas_kernels.oracles import NUMPY_DTYPES, wide
from tests.pallas_kernels.rotary.heads import (
    CODING,
    EPSILON,
    ROUNDING,
    Scene,
    head_error,
    scene,
    stored,
)
from tests.sweeps import combinations

CASES = [
    (16, "bfloat16", (4, 2), 96, 64, 5, 3),
    (16, "float16", (2, 2), 128, 128, 1, 1),
    (8, "bfloat16", (3, 1), 256, 64, 1, 3),
    ("KVfp8", "float16", (4, 2), 64, 128, 5, 1),
    (4, "bfloat16", (2, 2), 64, 128, 1, 1),
    ("K4V8", "float16", (2, 1), 96, 64, 2, 1),
    ("K8V4", "float16", (4, 1), 96, 64, 5, 3),
    ("K4V8", "bfloat16", (2, 1), 80, 64, 2, 1),
]
each_case = pytest.mark.parametrize(
    ("bits", "dtype", "heads", "head_dim", "page_size", "tokens", "splits"), CASES
)


def check(test: Scene, **keywords):
    """Against the oracle, and where that leaves some room, on a GPU, against the reference."""
    queries, pages = test.run(functools.partial(triton.rotate_and_append, **keywords))
    test.check(queries, pages)
    if test.is_exact or keywords.get("interpret"):
        return
    expected, expected_pages = test.run(reference.rotate_and_append)
    assert head_error(wide(queries), wide(expected)) < ROUNDING[test.dtype]
    mask, half = test.written(), NUMPY_DTYPES[test.dtype]
    keys, values = zip(*(stored(p, mask, half) for p in (pages, expected_pages)), strict=True)
    # A key that is rounded the other way may have the next code: each is half a step off at most.
    limit = ROUNDING[test.dtype] + 2 * CODING[test.pages.format.keys]
    assert head_error(*keys, test.smallest) < limit  # type: ignore[call-arg]
    np.testing.assert_array_equal(*values)


@pytest.mark.one_of(4)
@each_case
def test_without_norms_by_quarter_turns(
    bits, dtype, heads, head_dim, page_size, tokens, splits, rng
):
    """All of it is exact, so that each bit must be right."""
    sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size, "tokens": tokens}
    test = scene(rng, bits, dtype, splits=splits, quarters=True, **sizes)
    assert test.is_exact
    check(test, interpret=True)


@pytest.mark.parametrize(
    ("bits", "dtype", "heads", "head_dim", "tokens", "splits"),
    [
        (16, "bfloat16", (4, 2), 128, 3, 3),
        (4, "bfloat16", (2, 2), 64, 3, 1),
    ],
)
def test_with_norms_by_any_angle(bits, dtype, heads, head_dim, tokens, splits, rng):
    sizes = {"heads": heads, "head_dim": head_dim, "tokens": tokens, "splits": splits}
    check(scene(rng, bits, dtype, normed=True, **sizes), interpret=True)


def check_keys_as_values(rng, tokens, head_dim, **keywords):
    """Values are the keys before their norm and the rotation, and have a norm of their own."""
    sizes = {"tokens": tokens, "head_dim": head_dim, "splits": 3}
    test = scene(rng, 16, "bfloat16", normed=True, **sizes)
    terms, pages, span, rotation = test.arguments
    norms = dataclasses.replace(rotation.norms, values=True)  # type: ignore[type-var]
    rotation = dataclasses.replace(rotation, norms=norms, keys_as_values=True)
    plain = wide(test.places.keys)
    root = np.sqrt((plain * plain).mean(-1, keepdims=True) + EPSILON)
    values = (plain / root).astype(test.places.keys.dtype)
    keys = test.turned(test.places.keys, 1)
    expected = dataclasses.replace(test.places, keys=keys, values=values).oracle(pages)
    mask, half = test.written(), NUMPY_DTYPES["bfloat16"]
    kernel = functools.partial(triton.rotate_and_append, **keywords)
    for run in (reference.rotate_and_append, kernel):
        channels = terms.shape[-1] // 8 * 6  # of four query heads and two of keys
        queries, found = test.run(run, terms[..., :channels], pages, span, rotation)
        assert head_error(wide(queries), wide(test.turned(test.queries, 0))) < ROUNDING["bfloat16"]
        for one, other in zip(*(stored(p, mask, half) for p in (found, expected)), strict=True):
            assert head_error(one, other) < ROUNDING["bfloat16"]


@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_as_values_and_a_norm_of_values(tokens, rng):
    check_keys_as_values(rng, tokens, 64, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5])
def test_keys_as_values_on_the_gpu(tokens, rng):
    check_keys_as_values(rng, tokens, 512)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    ("dtype", "splits", "tokens", "normed"), [("bfloat16", 1, 512, False), ("float16", 3, 1, True)]
)
def test_lowers_with_every_page_array_aliased(bits, dtype, splits, tokens, normed, lower_for_cuda):
    """Qwen3-8B's heads."""
    batch, queries, heads, dim = 4, 32, 8, 128
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(
            KVLayout(heads, dim, KVFormat(bits), dtype=dtype),
            layers=1,
            batch=batch,
            max_tokens=4096,
        )
    )
    terms = jax.ShapeDtypeStruct(
        (splits, batch, tokens, (queries + 2 * heads) * dim), "float32" if splits > 1 else dtype
    )
    angles = jax.ShapeDtypeStruct((batch, tokens, dim // 2), jnp.float32)
    span = Span(cache.block_tables, cache.lengths, cache.lengths)
    weight = jax.ShapeDtypeStruct((dim,), dtype)
    norms = HeadNorms(weight, weight, 1e-6) if normed else None
    rotation = Rotation(angles, angles, (queries, heads), norms, transform_queries=True)
    append = functools.partial(triton.rotate_and_append, dtype=jnp.dtype(dtype))
    program = lower_for_cuda(append, terms, cache.layers[0], span, rotation)
    assert f'name = "rotate_and_append_kv{bits}"' in program
    assert ("div.rn.f32" in program) == (bits < 16)
    arrays, first = 2 if bits == 16 else 4, 6 + 2 * normed
    assert program.count("#stablehlo.output_operand_alias<") == arrays
    for index in range(arrays):
        alias = f"output_tuple_indices = [{1 + index}], operand_index = {first + index},"
        assert alias in program


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize(("normed", "quarters"), [(False, True), (False, False), (True, False)])
def test_on_the_gpu(bits, dtype, heads, head_dim, page_size, tokens, splits, normed, quarters, rng):
    sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size, "tokens": tokens}
    check(scene(rng, bits, dtype, splits=splits, normed=normed, quarters=quarters, **sizes))


@pytest.mark.gpu
@combinations(1, bits=[16, 8, 4], dtype=["bfloat16", "float16"], tokens=[1, 512])
def test_many_tokens_bit_for_bit_and_in_place_on_the_gpu(bits, dtype, tokens, rng):
    """Four sequences of up to 512 tokens; quarter turns leave nothing to round."""
    sizes = {"heads": (8, 2), "head_dim": 128, "page_size": 128, "tokens": tokens}
    test = scene(rng, bits, dtype, splits=3, quarters=True, pages=24, **sizes)
    terms, pages, *others = test.arguments
    pages = jax.tree.map(jnp.copy, pages)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)]
    append = functools.partial(triton.rotate_and_append, dtype=jnp.dtype(dtype))
    queries, written = jax.jit(append, donate_argnums=1)(terms, pages, *others)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(written)] == pointers
    test.check(queries, written)
