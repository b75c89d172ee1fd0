from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import (
    ActivationFormat,
    KVFormat,
    WeightFormat,
    quantize,
    quantize_activations,
)
from mpjax.models import Attention, DecoderConfig, Packed
from mpjax.models.mixer import means_of_squares
from mpjax.models.state import WHOLE, Room, StepContext
from tests.models.small import CONFIG, small_config
from tests.pallas_kernels.oracles import random_array

compiled = jax.jit


def attention_of(config: DecoderConfig) -> Attention:
    """The attention of the first layer."""
    return config.layers[0].attention.build(config, nnx.Rngs(0))


def context(angles: Any, counts: list[int], *, fresh: bool = False) -> StepContext:
    """New tokens of sequences with a page each, and none before."""
    rows = len(counts)
    starts, table = jnp.zeros(rows, jnp.int32), jnp.arange(rows, dtype=jnp.int32)[:, None]
    where = starts, jnp.array(counts, jnp.int32), (table,), None, None
    return StepContext({"global": angles}, *where, fresh)


def empty_pages(batch: int) -> Any:
    state = CONFIG.layers[0].attention.state(CONFIG)
    return state.create(Room(batch, batch, KVFormat(16), page_size=64), None)


@pytest.mark.parametrize("window", [None, 3])
def test_with_and_without_a_cache_fresh_or_not(window, rng):
    attention = attention_of(small_config((window,)))
    x = random_array(rng, (2, 9, 64), "float32") * 30
    angles = jnp.broadcast_to(jnp.arange(9.0)[:, None] * 0.1, (2, 9, 8))
    graph, state = nnx.split(attention)

    @jax.jit
    def attend(state, *arguments):
        return nnx.merge(graph, state)(x, *arguments)

    alone, nothing = attend(state, StepContext({"global": angles}))
    assert nothing is None
    assert alone.shape == x.shape
    written: list[Any] = []
    for fresh in (True, False):
        cached, pages = attend(state, context(angles, [9, 9], fresh=fresh), empty_pages(2))
        np.testing.assert_allclose(cached, alone, atol=1e-5)
        written.append(pages)
    jax.tree.map(np.testing.assert_array_equal, *written)
    assert np.abs(written[0].keys[:, :, :9]).min() > 0
    np.testing.assert_array_equal(written[0].keys[:, :, 9:], 0)


def test_calling_is_attending_and_the_output_projection(rng):
    changes: dict[str, Any] = {"qk_norm": True, "output_bias": True, "rms_norm_eps": 0.5}
    attention: Any = attention_of(small_config(**changes))
    norms = attention.query_norm, attention.key_norm
    for parameter in (attention.output.bias, *(norm.weight for norm in norms)):
        parameter.set_value(random_array(rng, parameter.get_value().shape, "float32"))
    x = random_array(rng, (2, 5, 64), "float32") * 30
    angles = jnp.asarray(rng.uniform(-9, 9, (2, 5, 8)).astype(np.float32))
    results = []
    places = [context(angles, [5, 3], fresh=fresh) for fresh in (True, False)]
    for where in (StepContext({"global": angles}), *places):
        pages = empty_pages(2) if where.is_cached else None
        attended, written = compiled(attention.mix)(x, where, pages)
        assert attended.shape == (2, 5, 4 * 16)
        y, others = compiled(attention)(x, where, pages)
        np.testing.assert_allclose(y, attention.output(attended), atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, written, others)
        results.append((attended, written))
    for attended, _ in results[1:]:
        for row, count in enumerate((5, 3)):
            np.testing.assert_allclose(attended[row, :count], results[0][0][row, :count], atol=1e-4)
    for one, other in zip(*(jax.tree.leaves(pages) for _, pages in results[1:]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("fresh", [None, True, False])
def test_attending_to_quantised_activations(fresh, rng):
    attention = attention_of(CONFIG)
    [fused] = attention.qkv.parts
    kernel: Any = fused.kernel.get_value()
    fused.kernel = Packed(quantize(kernel, WeightFormat.parse("int8/int8")))
    x = random_array(rng, (2, 5, 64), "float32") * 30
    assert attention.qkv.activations == ActivationFormat("int8")
    ready = quantize_activations(x, attention.qkv.activations)
    angles = jnp.ones((2, 5, 8))
    where, pages = StepContext({"global": angles}), None
    if fresh is not None:
        where, pages = context(angles, [5, 5], fresh=fresh), empty_pages(2)
    attend = compiled(attention.mix)
    attended, written = attend(ready, where, pages)
    expected, expected_pages = attend(x, where, pages)
    assert attended.dtype == jnp.float32
    np.testing.assert_allclose(attended, expected, atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), written, expected_pages)


def test_norms_and_biases_are_there_where_the_config_asks_for_them():
    plain = attention_of(CONFIG)
    assert plain.query_norm is None
    assert plain.key_norm is None
    assert plain.qkv.parts[0].bias is None
    changes: dict[str, Any] = {"qk_norm": True, "qkv_bias": True, "output_bias": True}
    full: Any = attention_of(small_config(**changes))
    assert full.query_norm.weight.get_value().shape == (16,)
    assert full.key_norm.weight.get_value().shape == (16,)
    assert full.qkv.parts[0].bias.get_value().shape == (64 + 2 * 32,)
    assert full.output.bias.get_value().shape == (64,)


def test_norms_make_the_size_of_queries_irrelevant(rng):
    """RMSNorm before the rotary embedding: scaling the query and key projections does nothing."""
    config = small_config(qk_norm=True, rms_norm_eps=1e-12)
    attention = attention_of(config)
    x, angles = random_array(rng, (1, 5, 64), "float32"), jnp.ones((1, 5, 8))
    before, _ = attention(x, StepContext({"global": angles}))
    [fused] = attention.qkv.parts
    scale = jnp.concatenate([jnp.full(64, 7.0), jnp.full(32, 0.5), jnp.ones(32)])
    kernel: Any = fused.kernel.get_value()
    fused.kernel = nnx.Param(kernel * scale[None])
    after, _ = attention(x, StepContext({"global": angles}))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_a_layer_gets_the_terms_and_the_inputs_of_the_maps(rng):
    config = small_config(output_bias=True)
    attention = attention_of(config)
    attention.output.bias = nnx.Param(jnp.asarray(random_array(rng, (64,), "float32")))
    x, attended = (random_array(rng, (1, 5, 64), "float32") for _ in range(2))
    terms = attention.terms(attended, WHOLE)
    np.testing.assert_array_equal(terms.sum(0), attention.output(attended))
    inputs = attention.inputs(x, attended)
    maps = config.layers[0].attention.linear_maps(config)
    assert [(path, read.shape[-1]) for path, read in inputs.items()] == [
        (each.path, each.shapes[0][0]) for each in maps
    ]
    assert inputs["qkv"] is x
    assert attention.activations == attention.qkv.activations


def testmeans_of_squares_are_those_of_all_devices(rng):
    """Of three, each of which has a third of the channels."""
    queries, keys = rng.standard_normal((3, 2, 8)), rng.standard_normal((3, 2, 4))
    parts = tuple(jnp.asarray(x, jnp.float32) for x in (queries, keys))

    def means(*parts):
        return means_of_squares(parts, (24, 12), "model")

    found = jax.vmap(means, axis_name="model")(*parts)
    for mean, x in zip(found, (queries, keys), strict=True):
        expected = np.square(x).mean((0, 2))[None, :, None]
        np.testing.assert_allclose(mean, np.tile(expected, (3, 1, 1)), rtol=1e-5)
