from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    Gate,
    QuantizedTensor,
    WeightFormat,
    grouped_matmul,
    grouped_matmul_terms,
    quantize,
    quantize_activations,
)
from mpjax.kernels.experts import triton
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.tiles import one_for_each_pair, sorted_by_expert
from mpjax.kernels.gemm.plans import TritonConfig
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.gemm.weights import ALL_FORMATS
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.sweeps import combinations, in_sweep

FLOAT32 = jnp.dtype("float32")
GATE = Gate(2.0, 1.5)


def config_of(text: str, splits: int, tile_m: int = 16) -> TritonConfig:
    return TritonConfig(tile_m, 32, splits, 2, 2, "accumulator")


def stack(rng: np.random.Generator, text: str, channels: int, outputs: int) -> Any:
    return quantize(random_array(rng, (EXPERTS, channels, outputs), "float32"), text)


def dense(weight: Any) -> np.ndarray:
    return wide(weight.dequantize() if isinstance(weight, QuantizedTensor) else weight)


def rows_of(rng: np.random.Generator, weight: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """x as the kernel takes it, and its values."""
    x = random_array(rng, shape, "bfloat16")
    if isinstance(weight, QuantizedTensor) and weight.format.operand:
        x = quantize_activations(x, weight.format)
        return x, wide(x.dequantize())  # type: ignore[attr-defined]
    return x, wide(x)


def rounded(x: jax.Array, weight: QuantizedTensor | jax.Array) -> np.ndarray:
    """The values of x in the activation format of a weight."""
    if isinstance(weight, QuantizedTensor) and weight.format.operand:
        return wide(quantize_activations(x, weight.format).dequantize())
    return wide(x)


products = jax.jit(
    functools.partial(triton.products, out_dtype=FLOAT32, interpret=True), static_argnames="config"
)
# A format of each kind of codes, and plain ones; others differ in their decoders alone.
MAIN = ("uint4:g32", "uint4:g128:sym", "table3:g32", "float8:g128", "bfloat16")
SOME = (*MAIN, "liquid4:g64/int8", "float8:gK/float8")


@pytest.mark.parametrize(
    "text", [t if t in SOME else in_sweep(t) for t in ALL_FORMATS] + ["bfloat16"]
)
def test_every_format(text, rng):
    """With splits, a bias, routing weights, and rows of one pair each; K is no whole block."""
    experts = jnp.asarray(ROUTINGS["mixed"])
    size = WeightFormat.parse(text).group_size or 1
    size *= -(-192 // size)
    size += 8 if text == "bfloat16" else 0
    weight = stack(rng, text, size, 48)
    x, values = rows_of(rng, weight, (10, size))
    bias, weights = (random_array(rng, shape, "float32") for shape in ((EXPERTS, 48), (5, 2)))
    tiles = sorted_by_expert(experts, EXPERTS, 16)
    epilogue = Epilogue(bias, None, weights)
    found = products(x, weight, tiles, epilogue, config=config_of(text, 2)).sum(0)
    whole = expected(
        values.reshape(5, 2, -1), dense(weight), np.asarray(experts), wide(weights), wide(bias)
    )
    assert relative_error(found, whole) < GATES["bfloat16"]


@combinations(1, name=list(ROUTINGS), tiling=["sorted", "pairs"])
def test_every_routing(name, tiling, rng):
    """With a gate, of which no tile divides the outputs, and with rows that pairs share."""
    experts = jnp.asarray(ROUTINGS[name])
    weight = stack(rng, "uint4:g32", 128, 80)
    x = random_array(rng, (len(experts), 128), "bfloat16")
    bias = random_array(rng, (EXPERTS, 80), "float32")
    tiles = one_for_each_pair(experts)
    if tiling == "sorted":
        tiles = sorted_by_expert(experts, EXPERTS, 8)
    epilogue, config = Epilogue(bias, GATE), config_of("uint4:g32", 1, 8)
    [found] = products(x, weight, tiles, epilogue, config=config)
    whole = expected(wide(x), dense(weight), np.asarray(experts), None, wide(bias), GATE)
    assert found.shape == (experts.size, 40)
    assert relative_error(found.reshape(whole.shape), whole) < GATES["bfloat16"]


def struct(text: str, channels: int, outputs: int, experts: int) -> Any:
    array = jax.ShapeDtypeStruct((experts, channels, outputs), jnp.bfloat16)
    return array if text == "bfloat16" else jax.eval_shape(lambda w: quantize(w, text), array)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("text", MAIN)
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_layer_lowers(text, tokens, lower_for_cuda, pretend_gpu):
    hidden, inner, experts = 2880 if WeightFormat.parse(text).group_size == 32 else 2048, 768, 16

    def layer(x, gate_up, down, chosen, weights):
        gated = grouped_matmul(x, gate_up, chosen, gate=Gate())
        return grouped_matmul_terms(gated, down, chosen, weights)

    lowered = lower_for_cuda(
        layer,
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        struct(text, hidden, 2 * inner, experts),
        struct(text, inner, hidden, experts),
        jax.ShapeDtypeStruct((tokens, 4), jnp.int32),
        jax.ShapeDtypeStruct((tokens, 4), jnp.float32),
    )
    assert f"experts_{WeightFormat.parse(text).codes}".replace("bfloat16", "plain") in lowered
    assert ("experts_tiles" in lowered) == (tokens > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*ALL_FORMATS, "bfloat16"])
def test_on_the_gpu(text, rng):
    """Both products of a layer against float64, for few and many tokens; the same bits again."""
    hidden, inner, experts, gate = 512, 256, 8, 1.5 * GATES["bfloat16"]
    gate_up, down = (
        quantize(random_array(rng, (experts, k, n), "float32") * k**-0.5, text)
        for k, n in ((hidden, 2 * inner), (inner, hidden))
    )

    @jax.jit
    def layer(x, chosen, weights):
        gated = grouped_matmul(x, gate_up, chosen, gate=Gate(), implementation="triton")
        return gated, grouped_matmul(
            gated, down, chosen, routing_weights=weights, implementation="triton"
        )

    for tokens in (1, 7, 40, 700) if text in MAIN else (7, 700):
        x = random_array(rng, (tokens, hidden), "bfloat16")
        chosen = np.argsort(rng.random((tokens, experts)), -1)[:, :3].astype(np.int32)
        chosen[: tokens // 2] = [0, 1, 2]  # many tokens to a few experts
        weights = random_array(rng, (tokens, 3), "float32")
        gated, whole = layer(x, chosen, weights)
        inside = expected(rounded(x, gate_up), dense(gate_up), chosen, gate=Gate())
        assert relative_error(gated, inside) < gate, f"{tokens} tokens"
        outside = expected(rounded(gated, down), dense(down), chosen, wide(weights))
        assert relative_error(whole, outside) < gate, f"{tokens} tokens"
        np.testing.assert_array_equal(whole, layer(x, chosen, weights)[1])


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("channels", "outputs"), [(128, 32), (100, 40)])
def test_matrices_that_tiles_divide_or_not(channels, outputs, rng):
    experts = ROUTINGS["mixed"]
    x = random_array(rng, (5, channels), "float16")
    weight = random_array(rng, (EXPERTS, channels, outputs), "bfloat16")
    tiles = sorted_by_expert(jnp.asarray(experts), EXPERTS, 8)
    config = TritonConfig(8, 32, 2, 2, 2)
    found = triton.products(
        x, weight, tiles, Epilogue(), config, jnp.dtype("float32"), interpret=True
    )
    whole = expected(wide(x), wide(weight), experts)
    assert len(found) == 2
    assert relative_error(np.asarray(found.sum(0)).reshape(whole.shape), whole) < GATES["float16"]
