from __future__ import annotations

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ProductFormat, matmul, quantize_activations
from mpjax.kernels.gemm import shapes
from mpjax.kernels.gemm.plans.configuration import FEW_ROWS, WarpgroupConfig
from mpjax.kernels.gemm.plans.operation import forced
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.warpgroup_rule import warpgroups_by_rule
from mpjax.kernels.gemm.warpgroups import launch, program
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.gemm.plans.problems import H200
from tests.pallas_kernels.gemm.weights import (
    dense,
    exact,
    integer_activations,
    integer_weight,
    random_activations,
    random_weight,
    weight_struct,
)
from tests.pallas_kernels.marks import interpreted_here
from tests.pallas_kernels.oracles import GATES, relative_error
from tests.sweeps import in_sweep

FORMATS = (
    *("uint4:g32", "uint4:g64", "uint4:g128", "uint4:g128:sym"),
    *("uint8:g32", "uint8:g128", "uint8:g64:sym", "float8:g128"),
    *("uint4:gK", "uint8:gK:sym", "float8:gK", "int8/int8", "float8:gK/float8"),
    *("table4:g64", "table3:g64", "table2:g32", "liquid4:g64/int8"),
    *("int4:g128/int8", "affine4:g32", "affine8:g64", "float4:g32"),
)
# Codes of other formats, with groups of another size or without zero points.
LIKE_OTHERS = (
    *("uint4:g64", "uint4:g128", "uint4:g128:sym", "uint8:g32", "uint8:g128", "uint8:gK:sym"),
    *("float8:gK", "affine8:g64"),
)
each_format = pytest.mark.parametrize("text", FORMATS)
# Tiles that stick out, more splits than blocks, K of half a block, fewer blocks than warpgroups
# that share them; the last of few rows and of many have more blocks and planes than there are
# slots, so that every barrier is waited for and comes round.
CASES = [
    ("uint4:g128", 24, 512, 192, WarpgroupConfig(8, 2, 1), "bfloat16", "float16"),
    ("uint4:g32", 20, 288, 128, WarpgroupConfig(32, 2, 2), "float16", "float16"),
    ("uint4:gK", 9, 700, 192, WarpgroupConfig(16, 2, 2), "bfloat16", "float16"),
    ("uint8:g32", 8, 672, 64, WarpgroupConfig(8, 4, 1, 4), "bfloat16", "float16"),
    ("uint4:g128", 40, 1280, 128, WarpgroupConfig(40, 2, 1), "bfloat16", "float16"),
    ("float8:g128", 16, 384, 128, WarpgroupConfig(16, 4, 2, 2), "bfloat16", "float32"),
    ("int8/int8", 7, 1300, 64, WarpgroupConfig(8, 2, 2), "bfloat16", "float32"),
    ("int8/int8", 200, 512, 128, WarpgroupConfig(256, 3, 1), "bfloat16", "float32"),  # two halves
    ("table3:g32", 16, 1056, 64, WarpgroupConfig(16, 2, 1, 2), "float16", "float16"),
    ("table2:g256", 30, 1280, 64, WarpgroupConfig(32, 2, 1), "bfloat16", "float16"),
    ("float8:gK/float8", 33, 600, 128, WarpgroupConfig(40, 3, 1), "bfloat16", "float32"),
    ("table4:g64", 130, 1088, 192, WarpgroupConfig(128, 3, 2), "bfloat16", "float16"),
    ("liquid4:g64/int8", 16, 1344, 128, WarpgroupConfig(16, 4, 1, 2), "bfloat16", "uint16"),
    ("affine4:g32", 9, 288, 128, WarpgroupConfig(16, 2, 2), "bfloat16", "float16"),
]


@interpreted_here
@pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "config", "dtype", "scale_dtype"),
    CASES,
)
def test_against_float64(text, rows, channels, outputs, config, dtype, scale_dtype, rng):
    for make_weight, make_x in (
        (random_weight, random_activations),
        (integer_weight, integer_activations),
    ):
        weight = make_weight(rng, text, channels, outputs, scale_dtype)
        x = make_x(rng, weight, rows, dtype)
        terms = launch.matmul_terms(x, weight, config, jnp.dtype(dtype), interpret=True)
        splits = min(config.splits, weight.padded_channels // weight.format.block)
        splits = 1 if config.is_cluster else splits
        assert terms.shape == (splits, rows, outputs)
        assert terms.dtype == (dtype if splits == 1 else jnp.float32)
        expected = exact(x) @ dense(weight)
        if make_weight is random_weight:
            assert relative_error(terms.astype(jnp.float32).sum(0), expected) < GATES[dtype]
        else:
            product = terms[0] if splits == 1 else terms.sum(0)
            rounded = expected.astype(np.float32).astype(product.dtype)
            np.testing.assert_array_equal(np.asarray(product), rounded)


@interpreted_here
@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize(
    ("text", "channels", "config"),
    [
        ("uint8:g128", 1280, WarpgroupConfig(40, 2, 1)),  # x is copied by planes
        ("int8/int8", 2500, WarpgroupConfig(48, 2, 2)),  # and by blocks
    ],
)
def test_with_and_without_a_producer(text, channels, config, gives, rng, monkeypatch):
    """Every slot is filled again, also by a split that begins at another block than the first."""
    monkeypatch.setattr(program, "can_give_registers", lambda: gives)
    weight = integer_weight(rng, text, channels, 128)
    x = integer_activations(rng, weight, config.tile_m - 1, "bfloat16")
    run = functools.partial(launch.matmul_terms.__wrapped__, interpret=True)  # type: ignore[attr-defined]
    grids = []
    launched = launch.launch
    monkeypatch.setattr(
        launch, "launch", lambda *a, **k: grids.append(k["grid"]) or launched(*a, **k)
    )
    terms = run(x, weight, config, jnp.dtype(jnp.float32))
    assert [grid.warpgroups for grid in grids] == [config.warpgroups + gives]
    expected = (exact(x) @ dense(weight)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(terms.sum(0)), expected)


@pytest.mark.parametrize(
    "interpret",
    [pytest.param(True, marks=interpreted_here), pytest.param(False, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("int8/int8", WarpgroupConfig(24, 3, 1)),
    ],
    ids=str,
)
def test_bands_of_rows(text, config, interpret, rng, monkeypatch, request):
    """The last one has a single tile, and less; the bits are those of a single band."""
    if not interpret:
        request.getfixturevalue("wgmma")
    weight = integer_weight(rng, text, 512, 64)
    x = integer_activations(rng, weight, 4 * config.tile_m + 9, "bfloat16")
    run = functools.partial(launch.matmul_terms.__wrapped__, interpret=interpret)  # type: ignore[attr-defined]
    whole = run(x, weight, config, jnp.dtype(jnp.float32))
    nbytes = jax.tree.leaves(x)[0].nbytes
    monkeypatch.setattr(launch, "BAND_BYTES", nbytes // 3)
    terms = run(x, weight, config, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(terms), np.asarray(whole))


@pytest.mark.one_of(5)
@pytest.mark.parametrize("text", [in_sweep(t) if t in LIKE_OTHERS else t for t in FORMATS])
def test_lowers_for_named_shapes(text, lower_for_cuda):
    """A small tile of rows and a large one."""
    lowered = set()
    for shape in (*shapes.QWEN3_8B, shapes.LLAMA3_70B[2]):
        weight = weight_struct(text, shape.channels, shape.outputs)
        for rows in (33, 1000):
            config = warpgroups_by_rule(
                Problem(rows, ProductFormat.of(weight.format), *weight.shape, H200)  # type: ignore[call-arg]
            )
            if config.tile_m in lowered:
                continue
            lowered.add(config.tile_m)
            dtype = "float16" if rows == 33 else "bfloat16"
            x = jax.ShapeDtypeStruct((rows, shape.channels), dtype)
            if weight.format.operand:
                x = jax.eval_shape(lambda x, f=weight.format: quantize_activations(x, f), x)
            multiply = functools.partial(
                launch.matmul_terms, config=config, out_dtype=jnp.dtype(dtype)
            )
            assert "mosaic_gpu" in lower_for_cuda(multiply, x, weight)
    assert lowered


def test_a_table_of_16_bits_lowers(lower_for_cuda):
    weight = weight_struct("table4:g64", 512, 128)
    table = jax.ShapeDtypeStruct(weight.table.shape, jnp.float16)
    x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)
    multiply = functools.partial(
        launch.matmul_terms, config=WarpgroupConfig(16, 2, 1), out_dtype=jnp.dtype(jnp.bfloat16)
    )
    assert "mosaic_gpu" in lower_for_cuda(multiply, x, dataclasses.replace(weight, table=table))


def test_scales_of_rows_that_stick_out_are_there():
    """The kernel reads them from memory, where nothing masks what lies outside of an array."""
    weight, x = weight_struct("int8/int8", 256, 64), jax.ShapeDtypeStruct((33, 256), jnp.bfloat16)
    x = jax.eval_shape(lambda x: quantize_activations(x, weight.format), x)
    config = WarpgroupConfig(64, 2, 1)
    multiply = functools.partial(launch.matmul_terms, config=config, out_dtype=x.scales.dtype)
    assert re.search(r"f32\[64\] = pad", str(jax.make_jaxpr(multiply)(x, weight)))


@pytest.mark.parametrize(
    ("text", "rows", "dtype", "scale_dtype", "kernel"),
    [
        ("uint4:g128", 33, "bfloat16", "float16", "matmul_warpgroups_uint4"),
        ("uint4:g128", 31, "bfloat16", "float16", "matmul_uint4"),
        ("uint4:g128", 24, "bfloat16", "float16", "matmul_warpgroups_uint4"),
        ("uint4:g128", 32, "bfloat16", "float16", "matmul_warpgroups_uint4"),
        ("int8/int8", 64, "bfloat16", "float32", "matmul_warpgroups_int8"),
        ("liquid4:g64/int8", 32, "bfloat16", "uint16", "matmul_liquid4"),
        ("liquid4:g64/int8", 33, "bfloat16", "uint16", "matmul_warpgroups_liquid4"),
        ("liquid4:g64/int8", 33, "float16", "uint16", "matmul_warpgroups_liquid4"),
        ("uint4:g128:sym", 4096, "float16", "float16", "matmul_warpgroups_uint4"),
        ("float8:g128", 200, "bfloat16", "float32", "matmul_warpgroups_float8"),
        ("float8:gK", 200, "float16", "float32", "matmul_warpgroups_float8"),
        # Float16 has not the range of these scales.
        ("uint4:g128", 200, "float16", "bfloat16", "matmul_uint4"),
        ("uint4:g128", 2000, "float16", "bfloat16", "dequantize_uint4"),
    ],
)
def test_is_chosen_for_what_it_can_multiply(text, rows, dtype, scale_dtype, kernel, pretend_gpu):
    weight = dataclasses.replace(weight_struct(text, 256, 128), scale_dtype=scale_dtype)
    x = jax.ShapeDtypeStruct((rows, 256), dtype)
    traced = str(jax.make_jaxpr(matmul)(x, weight))
    assert jax.eval_shape(matmul, x, weight).dtype == dtype
    assert re.findall(r"\b(?:matmul|dequantize)_\w+\d\b", traced)[0] == kernel


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@each_format
def test_on_the_gpu(text, rng):
    """Against float64 in both dtypes, whatever sticks out; integers exact; the same bits again."""
    channels, outputs = 1792, 1088
    rows_in_bfloat16 = (17, 1000) if text in LIKE_OTHERS else (1, 53, 128, 1000)
    for dtype, all_rows in (("bfloat16", rows_in_bfloat16), ("float16", (32,))):
        for make_weight, make_x in (
            (random_weight, random_activations),
            (integer_weight, integer_activations),
        ):
            weight = make_weight(rng, text, channels, outputs)
            x = make_x(rng, weight, all_rows[-1], dtype)
            expected = exact(x) @ dense(weight)
            least = FEW_ROWS + 1 if weight.format.codes == "int4" else 1  # the fewest in a tile
            for rows in (max(rows, least) for rows in all_rows):
                config = warpgroups_by_rule(
                    Problem(rows, ProductFormat.of(weight.format), *weight.shape, H200)  # type: ignore[call-arg]
                )
                run = functools.partial(launch.matmul_terms, out_dtype=jnp.dtype(jnp.float32))
                first = jax.tree.map(operator.itemgetter(slice(rows)), x)
                terms, again = (run(first, weight, config) for _ in range(2))
                np.testing.assert_array_equal(np.asarray(terms), np.asarray(again))
                product = np.asarray(terms.sum(0))
                if make_weight is integer_weight:
                    np.testing.assert_array_equal(product, expected[:rows].astype(np.float32))
                else:
                    assert relative_error(product, expected[:rows]) < GATES[dtype], f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@pytest.mark.parametrize(
    ("text", "config"),
    [
        *(("uint4:g128", (256, 2, 1)), ("uint4:g128", (96, 3, 3)), ("uint4:g128", (16, 4, 2, 4))),
        *(("uint4:g128", (8, 3, 1, 3)), ("uint4:g128", (16, 3, 2)), ("uint4:g32", (32, 2, 2))),
        *(("table4:g64", (128, 3, 2)), ("table3:g64", (8, 3, 1, 3)), ("table2:g256", (192, 2, 3))),
        *(("table2:g64", (16, 2, 2, 2)), ("affine4:g32", (8, 2, 2)), ("affine4:g32", (128, 2, 2))),
        *(("affine8:g64", (64, 2, 1)), ("int8/int8", (256, 3, 1))),
        *(("liquid4:g64/int8", (16, 4, 2, 2)), ("liquid4:g64/int8", (256, 2, 2))),
        ("float8:gK/float8", (256, 3, 1)),
    ],
    ids=str,
)
def test_any_configuration_on_the_gpu(text, config, rng):
    weight = integer_weight(rng, text, 4224, 1152)
    x = integer_activations(rng, weight, 300, "bfloat16")
    terms = launch.matmul_terms(x, weight, WarpgroupConfig(*config), jnp.dtype(jnp.float32))
    expected = (exact(x) @ dense(weight)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(terms.sum(0)), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
def test_long_sums_of_float8_on_the_gpu(rng):
    """The tensor cores keep fewer bits of these sums than float32 has."""
    weight = random_weight(rng, "float8:gK/float8", 12288, 128)
    x = random_activations(rng, weight, 256, "bfloat16")
    terms = launch.matmul_terms(x, weight, WarpgroupConfig(64, 2, 1), jnp.dtype(jnp.bfloat16))
    assert relative_error(terms[0], exact(x) @ dense(weight)) < GATES["bfloat16"]


@pytest.mark.gpu
@pytest.mark.usefixtures("wgmma")
@pytest.mark.parametrize(
    "config", [WarpgroupConfig(40, 2, 2), WarpgroupConfig(16, 2, 2, 2)], ids=str
)
def test_is_mapped_and_differentiated_on_the_gpu(config, rng):
    weight = random_weight(rng, "uint4:g128", 512, 256)
    x = random_activations(rng, weight, 80, "bfloat16").reshape(2, 40, 512)
    with forced(Plan("mosaic", config)):
        whole = matmul(x, weight)
        mapped = jax.vmap(lambda rows: matmul(rows, weight))(x)
        gradient = jax.grad(lambda x: matmul(x, weight).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(mapped))
    columns = dense(weight).sum(1)
    assert relative_error(gradient, np.broadcast_to(columns, x.shape)) < GATES["bfloat16"]
