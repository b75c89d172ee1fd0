"""Batch invariance: rows of a product, and tokens of attention, are computed by themselves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import kernels
from mpjax.kernels import device
from mpjax.kernels.attention import triton as attention
from mpjax.kernels.attention.plans import config_of
from mpjax.kernels.attention.plans.problem import CacheShape
from mpjax.kernels.attention.plans.problem import Problem as AttentionProblem
from mpjax.kernels.gemm import triton as gemm
from mpjax.kernels.gemm.plans import OPERATION, Problem, plan_of, why_unsound
from mpjax.kernels.invariance import batch_invariant, in_row_tiles, is_batch_invariant, product
from mpjax.kernels.kv_cache.cache import create_pages
from mpjax.kernels.product_format import ProductFormat

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.standard_normal((37, 192)), jnp.bfloat16)
WEIGHT = jnp.asarray(RANDOM.standard_normal((192, 96)), jnp.bfloat16)


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("kind", ["plain", "transposed", "narrow", "packed"])
def test_rows_of_a_product_do_not_depend_on_one_another(kind):
    weight = kernels.quantize(WEIGHT, "uint4:g64") if kind == "packed" else WEIGHT
    weight = weight[:, :1] if kind == "narrow" else weight

    @jax.jit
    def multiply(x):
        with batch_invariant():
            if kind == "transposed":
                return product(x, weight.T, jnp.float32, axis=1)
            return kernels.matmul(x, weight, out_dtype=jnp.float32)

    whole = multiply(X)
    expected = X.astype(jnp.float32) @ (
        weight.dequantize(jnp.float32) if kind == "packed" else weight.astype(jnp.float32)
    )
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    for rows in (slice(3, 4), slice(5, 13), slice(0, 20)):
        same(multiply(X[rows]), whole[rows])


def test_norms_of_rows_do_not_depend_on_one_another():
    @jax.jit
    def norm(x):
        with batch_invariant():
            return kernels.rms_norm(x, jnp.ones(192), 1e-6)

    whole = norm(X)
    np.testing.assert_allclose((whole**2).mean(-1), 1, rtol=1e-3)
    for rows in (slice(3, 4), slice(5, 13), slice(0, 20)):
        same(norm(X[rows]), whole[rows])


def test_the_mode_is_of_the_context():
    """`jit` traces again for it, and derivatives are those of the plain function."""
    assert not is_batch_invariant()
    seen = []

    @jax.jit
    def multiply(x):
        seen.append(is_batch_invariant())
        return in_row_tiles(jnp.dot, x, WEIGHT.astype(jnp.float32))

    x = X.astype(jnp.float32)
    for wanted in (False, True, False):
        with batch_invariant(wanted):
            found = multiply(x)
            slope = jax.grad(lambda x: (multiply(x) ** 2).sum())(x)
        with batch_invariant(), batch_invariant(False):
            assert not is_batch_invariant()
        np.testing.assert_allclose(found, jnp.dot(x, WEIGHT.astype(jnp.float32)), atol=1e-4)
        np.testing.assert_allclose(slope, 2 * found @ WEIGHT.T.astype(jnp.float32), atol=1e-2)
    assert {False, True} <= set(seen)
    with pytest.raises(ValueError, match="batch_invariant: wanted is 1"), batch_invariant(1):
        pass


@pytest.mark.parametrize("text", ["uint4:g128", "float4:g32", "int8", "table4:g64"])
def test_plans_of_products_add_in_one_order(text):
    format = ProductFormat.of(text)
    for channels, outputs in ((4096, 6144), (12288, 4096), (512, 512)):
        orders = set()
        for rows in (1, 8, 16, 17, 64, 65, 128, 300, 4096):
            problem = Problem(rows, format, channels, outputs, device.limits())
            with batch_invariant():
                plan = plan_of(problem)
            config = plan.config
            assert plan.implementation == "triton"
            assert why_unsound(config, problem) is None
            assert config.tile_n == 16 * config.warps
            orders.add((config.splits, config.scaling, config.width))
        assert len(orders) == 1


def test_programs_that_add_up_splits_round_as_their_terms_do():
    weight = kernels.quantize(jnp.asarray(RANDOM.standard_normal((512, 64))), "uint4:g128")
    x = jnp.asarray(RANDOM.standard_normal((8, 512)), jnp.bfloat16)
    problem = Problem.of(8, weight)
    config = dataclasses.replace(OPERATION.invariant(problem).config, splits=2)
    terms = gemm.matmul_terms(x, weight, config, x.dtype, interpret=True)
    serial = dataclasses.replace(config, serial=True)
    [found] = gemm.matmul_terms(x, weight, serial, x.dtype, interpret=True)
    assert found.dtype == jnp.float32
    same(found, terms[0] + terms[1])


def test_tokens_of_attention_have_a_plan_of_their_own():
    for text in ("KV16", "KV8", "KV4"):
        cache = CacheShape(kernels.KVFormat.parse(text), 8, 128, 128)
        sizes = [(1, 4, 128, False), (64, 4, 8192, False), (3, 4096, 2048, True)]
        with batch_invariant():
            found = {
                config_of(AttentionProblem(batch, rows, tokens, cache, device.limits(), varlen))
                for batch, rows, tokens, varlen in sizes
            }
        assert len(found) == 1


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_s_keys_are_added_in_one_order(window):
    """Interpreted, in the kernel: alone and with tokens before it, also behind a window.

    In float32, since bfloat16 hides orders; the tokens' windows begin in different tiles.
    """
    layout = kernels.KVLayout(1, 64, "KV16", 16)
    [pages] = create_pages(layout, layers=1, pages=8, sequences=1)
    keys, values, queries = (
        jnp.asarray(RANDOM.standard_normal((1, 100, heads, 64)), jnp.bfloat16)
        for heads in (1, 1, 2)
    )
    tables = jnp.arange(8)[None]

    def span(start, count):
        return kernels.Span(tables, jnp.array([start]), jnp.array([count]))

    pages = kernels.append(pages, keys, values, span(0, 100))
    masks = kernels.Masks(window=window)
    with batch_invariant():
        problem = AttentionProblem.of(2, pages, tables.shape)
        config = dataclasses.replace(config_of(problem), tile_keys=16, splits=3)

        def attend(start, count):
            new = queries[:, start : start + count].astype(jnp.float32)
            where = span(start, count).read("test", new.shape[:2])
            return attention.paged_attention(new, pages, where, masks, config, interpret=True)

        whole = attend(60, 40)
        expected = kernels.paged_attention(queries[:, 60:], pages, span(60, 40), masks)
        np.testing.assert_allclose(whole, np.asarray(expected, np.float32), atol=0.03)
        for number in (0, 12, 30):
            same(attend(60 + number, 1)[:, 0], whole[:, number])


@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4"])
def test_tokens_of_the_reference_do_not_depend_on_one_another(text):
    layout = kernels.KVLayout(2, 32, text, 16)
    [pages] = create_pages(layout, layers=1, pages=40, sequences=2)
    keys, values, queries = (
        jnp.asarray(RANDOM.standard_normal((1, 300, heads, 32)), jnp.bfloat16)
        for heads in (2, 2, 4)
    )
    masks = kernels.Masks(window=270, softcap=5.0, sinks=jnp.ones(4))
    tables = jnp.arange(20)[None]
    own = kernels.Span(tables, jnp.array([0]), jnp.array([300]))
    pages = kernels.append(pages, keys, values, own)
    usual = kernels.paged_attention(queries, pages, own, masks)

    @jax.jit
    def attend(queries, span):
        with batch_invariant():
            return kernels.paged_attention(queries, pages, span, masks)

    whole = attend(queries, own)
    np.testing.assert_allclose(
        np.asarray(whole, np.float32), np.asarray(usual, np.float32), atol=0.03
    )
    for start, count in ((0, 1), (299, 1), (250, 30)):
        at = kernels.Span(tables, jnp.array([start]), jnp.array([count]))
        same(attend(queries[:, start : start + count], at), whole[:, start : start + count])
    varlen = kernels.Span(
        jnp.concatenate([tables + 20, tables]), jnp.array([0, 260]), jnp.array([7, 5])
    )
    both = jnp.concatenate([queries[0, :7], queries[0, 260:265], queries[0, :4]])
    same(attend(both, varlen)[7:12], whole[0, 260:265])


def test_formats_with_blocks_are_refused():
    layout = kernels.KVLayout(1, 64, "KV2", 256)
    [pages] = create_pages(layout, layers=1, pages=1, sequences=1)
    where = kernels.Span(jnp.zeros((1, 1), jnp.int32), jnp.array([0]), jnp.array([1]))
    queries = jnp.zeros((1, 1, 1, 64), jnp.bfloat16)
    with (
        batch_invariant(),
        pytest.raises(kernels.UnsupportedError, match="KV2 can't be batch invariant: a token"),
    ):
        kernels.paged_attention(queries, pages, where)
