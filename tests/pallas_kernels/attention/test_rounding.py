from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    ActivationBlocks,
    KVFormat,
    KVLayout,
    Masks,
    PagedKVCache,
    QuantizedActivations,
    Span,
    paged_attention,
)
from mpjax.kernels.attention import triton
from mpjax.kernels.attention.combine import FLOOR, Partials, combine, combine_balanced
from mpjax.kernels.attention.plans import Problem
from mpjax.kernels.attention.plans.rule import config_by_rule
from mpjax.kernels.attention.rounding import can_round
from mpjax.kernels.rowwise.api import quantize_rows
from tests.pallas_kernels.attention.scenes import scene
from tests.pallas_kernels.oracles import wide
from tests.pallas_kernels.rowwise.test_blocks import assert_alike
from tests.sweeps import in_sweep

DTYPE = jnp.dtype("float32")


def blocks_of(rng: np.random.Generator, channels: int) -> ActivationBlocks:
    bits = rng.permutation(np.resize(np.uint8([4, 8]), channels // 128))
    return ActivationBlocks(jnp.asarray(bits))


def rounded(outputs: Any, blocks: ActivationBlocks) -> QuantizedActivations:
    """Outputs [tokens, heads, dim] that are rounded by a kernel of their own."""
    outputs = jnp.asarray(outputs)
    return quantize_rows(outputs.reshape(len(outputs), -1), blocks)


def test_blocks_of_whole_heads_are_rounded():
    order = jnp.arange(256)
    assert [can_round(ActivationBlocks(), dim) for dim in (64, 96, 128, 256)] == [False] * 2 + [
        True
    ] * 2
    assert not can_round(ActivationBlocks(None, order), 128)


@pytest.mark.parametrize(
    ("splits", "heads", "dim"), [(3, 2, 256), in_sweep(70, 4, 128), in_sweep(1, 3, 128)]
)
def test_joined_splits(splits, heads, dim, rng):
    outputs = rng.standard_normal((3, heads, splits, dim)).astype(np.float32)
    sums = rng.uniform(-20, 20, (3, heads, splits)).astype(np.float32)
    outputs[0], sums[0] = 0, FLOOR  # no part saw a key
    blocks = blocks_of(rng, heads * dim)
    run = functools.partial(combine, jnp.asarray(outputs), jnp.asarray(sums), DTYPE, interpret=True)
    found = run(blocks=blocks).activations((3,), DTYPE)
    assert_alike(found, rounded(run(), blocks))


@pytest.mark.parametrize("own", [1, 2])
def test_balanced_parts(own, rng):
    """Also rows that one program read alone, which are final before."""
    batch, heads, dim, pieces = 3, 2, 128, 20
    firsts, lasts = np.array([-1, batch * own, -1]), np.array([7, batch * own + pieces - 1, -9])
    shape = ((batch * own + pieces) * 2, heads, 1)
    parts = Partials(
        jnp.asarray(rng.standard_normal((*shape, dim)), jnp.float32),
        jnp.asarray(rng.uniform(-9, 9, shape), jnp.float32),
        jnp.asarray(firsts, jnp.int32),
        jnp.asarray(lasts, jnp.int32),
        jnp.asarray(rng.standard_normal((2 * batch, heads, 1, dim)), DTYPE) if own == 1 else None,
    )
    blocks = blocks_of(rng, heads * dim)
    run = functools.partial(combine_balanced, parts, 2 * batch, DTYPE, own=own, interpret=True)
    found = run(blocks=blocks).activations((2 * batch,), DTYPE)
    assert_alike(found, rounded(run(), blocks))


on_gpu = pytest.param(False, marks=pytest.mark.gpu)


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("text", "heads", "splits"),
    [("K4cV4c", (2, 2), None), ("KV4", (2, 2), 1), in_sweep("KV16", (1, 20), 1)],
)
def test_the_kernel_rounds_what_it_gives(text, heads, splits, interpret, rng):
    """By the kernel that joins programs, or by the only program, in tiles of few or many rows."""
    lengths: dict[str, Any] = {"starts": [300, 60], "counts": [1, 1]}
    queries, pages, span = scene(
        rng, text, "bfloat16", heads=heads, head_dim=128, **lengths
    ).arguments
    problem = Problem.of(heads[1], pages, span.block_tables.shape)
    config = config_by_rule(problem)
    if splits is not None:
        config = dataclasses.replace(config, splits=1, residual_splits=0)
    assert (config.programs == 1) == (splits == 1)
    blocks, count = blocks_of(rng, 128 * heads[0] * heads[1]), heads[0] * heads[1]
    read = span.read("kernel", queries.shape[:2])
    run = functools.partial(triton.paged_attention, queries, pages, read, Masks(), config)
    found: Any = run(blocks=blocks, interpret=interpret)
    plain = run(interpret=interpret)
    assert found.shape == (2, 1, 128 * count)
    steps = np.repeat(wide(found.scales), 128, -1)
    error = np.abs(wide(found.dequantize()) - wide(plain).reshape(found.shape))
    assert (error <= 0.52 * steps + np.abs(wide(plain)).reshape(found.shape) / 256).all()
    largest = np.abs(wide(found.values)).reshape(2, count, 128).max(-1)
    np.testing.assert_array_equal(largest[0], np.where(np.asarray(blocks.bits) == 4, 7, 127))


@pytest.mark.parametrize(("head_dim", "permuted"), [(64, False), (128, False), in_sweep(128, True)])
def test_elsewhere_another_kernel_rounds(head_dim, permuted, rng):
    """Here, without a GPU, it is the reference."""
    test = scene(rng, "KV8", "bfloat16", head_dim=head_dim, starts=[30, 20], counts=[1, 1])
    channels = test.arguments[0].shape[-2] * head_dim
    blocks = blocks_of(rng, channels)
    if permuted:
        blocks = ActivationBlocks(blocks.bits, jnp.asarray(rng.permutation(channels), jnp.int32))
    found = paged_attention(*test.arguments, blocks=blocks)
    plain = paged_attention(*test.arguments)
    assert_alike(found, quantize_rows(plain.reshape(*plain.shape[:-2], channels), blocks))


@pytest.mark.parametrize(
    ("text", "batch", "tokens"),
    [("K4cV4c", 1, 4000), ("KV4", 64, 100), ("KV8", 1, 200)],
)
def test_a_decoding_step_lowers_without_another_kernel(
    text, batch, tokens, lower_for_cuda, pretend_gpu
):
    layout = KVLayout(8, 128, KVFormat.parse(text), 128, dtype="bfloat16")
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(layout, layers=1, batch=batch, max_tokens=tokens)
    )
    shape: Any = jax.ShapeDtypeStruct

    def attend(queries: Any, pages: Any, tables: Any, starts: Any, bits: Any) -> Any:
        span = Span(tables, starts, jnp.ones_like(starts))
        return paged_attention(queries, pages, span, blocks=ActivationBlocks(bits))

    program = lower_for_cuda(
        attend,
        shape((batch, 1, 32, 128), jnp.bfloat16),
        cache.layers[0],
        cache.block_tables,
        cache.lengths,
        shape((32,), jnp.uint8),
    )
    assert f'name = "attention_{text.lower()}"' in program
    assert f"tensor<{batch}x32x128xi8>" in program
    assert "quantize_rows" not in program
