from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    Gate,
    PlainCodes,
    WeightFormat,
    grouped_matmul,
    grouped_matmul_terms,
    pack,
    quantize,
)
from mpjax.kernels.experts import warpgroups
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.plans import ExpertsWarpgroupConfig, forced
from mpjax.kernels.experts.tiles import Tiles, sorted_by_expert
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.experts.cases import EXPERTS, expected
from tests.pallas_kernels.experts.test_triton import dense, rounded, rows_of, stack
from tests.pallas_kernels.marks import interpreted_here
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.sweeps import combinations

FLOAT32 = jnp.dtype("float32")
GATE = Gate(2.0, 1.5)
# A format of each main loop, and of each kind of parameters.
FORMATS = (
    *("uint4:g128", "uint8:gK:sym", "float8:g128", "table4:g64", "int8/int8", "liquid4:g64/int8"),
    *("int4:g128/int8", "float4:g32", "bfloat16"),
)

products = jax.jit(
    functools.partial(warpgroups.products, out_dtype=FLOAT32, interpret=True),
    static_argnames="config",
)


@interpreted_here
@pytest.mark.parametrize(
    ("text", "gate", "rows", "consumers"),
    [
        ("uint4:g128", GATE, 48, 4),
        ("liquid4:g64/int8", None, 48, 3),
        ("bfloat16", None, 48, 3),
    ],
)
def test_against_float64(text, gate, rows, consumers, rng):
    """Each expert has several tiles, or none; a tile is not whole.

    K is no whole block, unless weights are plain.
    """
    size = 64 if text == "bfloat16" else WeightFormat.parse(text).group_size or 8
    channels, outputs, tokens = size * -(-300 // size), 192 if gate is None else 256, 70
    weight = stack(rng, text, channels, outputs)
    chosen = np.array([[2, 4], [4, 0]] * (tokens // 2), np.int32)
    x, values = rows_of(rng, weight, (tokens, channels))
    bias, weights = random_array(rng, (EXPERTS, outputs), "float32"), None
    if gate is None:
        weights = random_array(rng, (tokens, 2), "float32")
    tiles = sorted_by_expert(jnp.asarray(chosen), EXPERTS, rows)
    config, epilogue = ExpertsWarpgroupConfig(rows, consumers, 1), Epilogue(bias, gate, weights)
    [found] = products(x, weight, tiles, epilogue, config=config)
    whole = expected(
        *(values, dense(weight), chosen, None if weights is None else wide(weights)),
        *(wide(bias), gate),
    )
    assert relative_error(wide(found).reshape(whole.shape), whole) < GATES["bfloat16"]


@interpreted_here
def test_codes_of_mxfp4_are_exact(rng):
    """All codes with scales of sixteen binades, each read by a row of x with a single one."""
    codes = jnp.asarray(rng.permuted(np.arange(1024) % 16).reshape(1, 64, 16), jnp.uint8)
    codes = jnp.tile(codes, (1, 1, 4))
    scales = jnp.asarray(np.ldexp(1.0, rng.integers(-8, 8, (1, 2, 64))), jnp.bfloat16)
    plain = PlainCodes("float4:g32", codes, scales)
    tiles = sorted_by_expert(jnp.zeros((64, 1), jnp.int32), 1, 64)
    one, config = jnp.eye(64, dtype=jnp.bfloat16), ExpertsWarpgroupConfig(64, 2, 1)
    [found] = products(one, pack(plain), tiles, Epilogue(), config=config)
    np.testing.assert_array_equal(found, plain.dequantize()[0])


def lowered_layer(lower: Any, text: str, tokens: int, dtype: str, **changes: Any) -> str:
    """The text of both products of a layer of 8 experts, of which a token has two.

    dtype: of x. changes: to the fields of the weights.
    """
    plain = (jax.ShapeDtypeStruct((8, *shape), jnp.bfloat16) for shape in ((512, 768), (384, 512)))
    gate_up, down = (jax.eval_shape(lambda w: quantize(w, text), weight) for weight in plain)

    def layer(x, gate_up, down, chosen, weights):
        gated = grouped_matmul(x, gate_up, chosen, gate=Gate())
        return grouped_matmul_terms(gated, down, chosen, weights)

    if changes:
        gate_up, down = (dataclasses.replace(weight, **changes) for weight in (gate_up, down))
    x = jax.ShapeDtypeStruct((tokens, 512), dtype)
    chosen, weights = (jax.ShapeDtypeStruct((tokens, 2), dtype) for dtype in ("int32", "float32"))
    terms = jax.eval_shape(layer, x, gate_up, down, chosen, weights)
    assert terms.dtype == "float32"
    return lower(layer, x, gate_up, down, chosen, weights)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("text", FORMATS)
def test_a_layer_lowers(text, lower_for_cuda, pretend_gpu):
    kernel = f"experts_warpgroups_{WeightFormat.parse(text).codes}"
    assert lowered_layer(lower_for_cuda, text, 300, "bfloat16").count(kernel) >= 2


def test_is_chosen_for_what_it_can_multiply(lower_for_cuda, pretend_gpu):
    """Not for few tokens, nor for scales beyond the range of x, nor for x of another dtype."""
    cases: list[tuple[str, int, dict[str, str]]] = [
        *(("uint4:g128", 8, {}), ("float4:g32", 300, {}), ("bfloat16", 300, {})),
        ("uint4:g128", 300, {"scale_dtype": "bfloat16"}),
    ]
    for text, tokens, changes in cases:
        lowered = lowered_layer(lower_for_cuda, text, tokens, "float16", **changes)
        assert "experts_warpgroups" not in lowered
        assert "experts_" in lowered


def test_rows_are_not_copied_to_be_padded(lower_for_cuda):
    """Where K is no whole block, but whole planes, as in gpt-oss."""
    for channels, count in ((288, 0), (256, 0), (280, 1)):
        weight = jax.ShapeDtypeStruct((8, channels, 128), jnp.bfloat16)
        text = "float4:g32" if channels % 32 == 0 else "uint4:gK"
        weight = jax.eval_shape(lambda w, t=text: quantize(w, t), weight)
        x = jax.ShapeDtypeStruct((3 * 64, channels), jnp.bfloat16)
        tiles = Tiles(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((3,), (3, 64))), 192)  # type: ignore[call-arg]
        config = ExpertsWarpgroupConfig(64, 2, 1)
        run = functools.partial(warpgroups.of_tiles, config=config, out_dtype=FLOAT32)
        lowered = lower_for_cuda(lambda *given, r=run: r(*given, Epilogue()), x, weight, tiles)
        assert lowered.count("stablehlo.pad") == count


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@pytest.mark.parametrize("text", FORMATS)
def test_on_the_gpu(text, rng):
    """Both products of a layer against float64; the same bits again.

    Of MXFP4, no K is a whole block.
    """
    hidden, inner, experts, gate = 1024, 384, 8, 1.5 * GATES["bfloat16"]
    if text == "float4:g32":
        hidden, inner = 1088, 448
    gate_up, down = (
        quantize(random_array(rng, (experts, k, n), "bfloat16") * jnp.bfloat16(k**-0.5), text)
        for k, n in ((hidden, 2 * inner), (inner, hidden))
    )
    bias = random_array(rng, (experts, hidden), "float32")

    @jax.jit
    def layer(x, chosen, weights):
        gated = grouped_matmul(x, gate_up, chosen, gate=Gate(), implementation="mosaic")
        return gated, grouped_matmul(
            *(gated, down, chosen), routing_weights=weights, bias=bias, implementation="mosaic"
        )

    for tokens in (1, 7, 300, 3000) if text in ("uint4:g128", "bfloat16") else (7, 300):
        x = random_array(rng, (tokens, hidden), "bfloat16")
        chosen = np.argsort(rng.random((tokens, experts)), -1)[:, :2].astype(np.int32)
        chosen[: tokens if tokens == 300 else tokens // 2] = [5, 1]  # all tokens, or many
        weights = random_array(rng, (tokens, 2), "float32")
        gated, whole = layer(x, chosen, weights)
        inside = expected(rounded(x, gate_up), dense(gate_up), chosen, gate=Gate())
        assert relative_error(gated, inside) < gate, f"{tokens} tokens"
        outside = expected(rounded(gated, down), dense(down), chosen, wide(weights), wide(bias))
        assert relative_error(whole, outside) < gate, f"{tokens} tokens"
        np.testing.assert_array_equal(whole, layer(x, chosen, weights)[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
def test_all_codes_and_scales_of_mxfp4_on_the_gpu():
    """Exact, but for products beyond float32's range and its subnormals."""
    exponents = np.arange(-127, 128).repeat(2)[:384]
    for first in (exponents, exponents[::-1]):
        scales = jnp.asarray(np.ldexp(1.0, first), jnp.bfloat16).reshape(1, 1, 384)
        codes = jnp.tile(jnp.arange(16, dtype=jnp.uint8).repeat(2)[None, :, None], (1, 1, 384))
        plain = PlainCodes("float4:g32", codes, scales)
        x = jnp.eye(32, dtype=jnp.bfloat16)
        run = jax.jit(functools.partial(grouped_matmul_terms, implementation="mosaic"))
        [found] = run(x, pack(plain), jnp.zeros((32, 1), jnp.int32), jnp.ones((32, 1)))
        whole = wide(plain.dequantize()[0])
        is_normal = np.isfinite(whole) & ((np.abs(whole) > 2.0**-126) | (whole == 0))
        np.testing.assert_array_equal(np.asarray(found)[is_normal], whole[is_normal])


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@combinations(1, tile=[(80, 4), (96, 4), (128, 2), (176, 2), (224, 2)], gate=[None, Gate()])
def test_tiles_on_the_gpu(tile, gate, rng):
    """Heights of tiles, and bands of rows."""
    weight = quantize(random_array(rng, (8, 2048, 768), "float32") * 0.02, "uint4:g128")
    x = random_array(rng, (4096, 2048), "bfloat16")
    chosen = np.argsort(rng.random((4096, 8)), -1)[:, :2].astype(np.int32)
    plan = Plan("mosaic", ExpertsWarpgroupConfig(*tile, 1))  # type: ignore[call-arg]
    with forced(plan):
        found = jax.jit(functools.partial(grouped_matmul, gate=gate))(x, weight, chosen)
    some = slice(0, 4096, 64)
    whole = expected(wide(x[some]), dense(weight), chosen[some], gate=gate)
    assert relative_error(found[some], whole) < 1.5 * GATES["bfloat16"]
