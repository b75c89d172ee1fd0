"""Adapters' changes of products: kernels against the formula, and what they are launched for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    UnsupportedError,
    add_low_rank,
    gated,
    gated_low_rank,
    matmul_low_rank_terms,
    matmul_terms,
    quantize,
)
from mpjax.kernels.low_rank import triton
from mpjax.kernels.low_rank.triton import FEW_ROWS, STEP_ROWS, Segments
from tests.sweeps import in_sweep

on_gpu = pytest.param(False, marks=pytest.mark.gpu)


def random(rng, *shape, scale=1.0, dtype=jnp.bfloat16):
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def problem(rng, rows, places, sizes, rank=8, channels=160, splits=2, dtype=jnp.bfloat16):
    """The arguments of `add_low_rank`; a third of the rows have no adapter."""
    terms = random(rng, splits, rows, sum(sizes), dtype=dtype if splits == 1 else jnp.float32)
    down = random(rng, places, channels, rank * len(sizes), scale=channels**-0.5, dtype=dtype)
    ups = [random(rng, places, rank, size, dtype=dtype) for size in sizes]
    adapters = rng.integers(1, places + 1, rows) * (rng.random(rows) > 1 / 3)
    return terms, random(rng, rows, channels, dtype=dtype), down, ups, jnp.asarray(adapters)


def formula(terms, x, down, ups, adapters):
    """The sum of the terms with the changes, in float64."""
    found = np.asarray(terms, np.float64).sum(0)
    factors = np.split(np.asarray(down, np.float64), len(ups), -1)
    for row, adapter in enumerate(np.asarray(adapters)):
        for_maps = [
            np.asarray(x[row], np.float64)
            @ factor[adapter - 1]
            @ np.asarray(up, np.float64)[adapter - 1]
            for factor, up in zip(factors, ups, strict=True)
        ]
        if adapter:
            found[row] += np.concatenate(for_maps)
    return found


def error(found, expected):
    found = np.asarray(found, np.float64).sum(0)
    return np.abs(found - expected).mean() / np.abs(expected).mean()


def run(terms, x, down, ups, adapters, *, interpret):
    adapters = adapters.astype(jnp.int32)
    inner = triton.shrink(x, down, adapters, interpret=interpret)
    return triton.expand(jnp.array(terms), inner, ups, adapters, interpret=interpret)


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("rows", "places", "sizes", "rank", "dtype"),
    [
        (1, 2, (40, 24, 24), 8, jnp.bfloat16),  # one row, and ranks and outputs that fill no tile
        (FEW_ROWS, 3, (300,), 16, jnp.float16),
        (FEW_ROWS + 1, 2, (72,), 24, jnp.bfloat16),
        (70, 5, (64, 64), 8, jnp.bfloat16),  # two blocks, the second of which is not full
        in_sweep(64, 64, (256, 64), 16, jnp.bfloat16),
        (STEP_ROWS + 3, 3, (64,), 8, jnp.bfloat16),  # a prompt
        in_sweep(32, 32, (33000, 500), 8, jnp.bfloat16),  # programs of several tiles of outputs
    ],
)
def test_kernels_are_the_formula(rng, rows, places, sizes, rank, dtype, interpret):
    splits = 1 + rows % 2
    arguments = problem(rng, rows, places, sizes, rank, splits=splits, dtype=dtype)
    expected, without = formula(*arguments), np.asarray(arguments[-1]) == 0
    found = run(*arguments, interpret=interpret)
    assert (found.shape, found.dtype) == (arguments[0].shape, arguments[0].dtype)
    assert error(found, expected) < (8e-3 if dtype == jnp.bfloat16 else 1e-3)
    np.testing.assert_array_equal(found[:, without], arguments[0][:, without])


@pytest.mark.parametrize("places", [2, 33])
def test_more_rows_than_a_tile_share_an_adapter(places, rng):
    """Rows of one adapter among others are gathered, a segment at a time."""
    terms, x, down, ups, _ = problem(rng, 64, places, (32,))
    adapters = jnp.asarray([1, 0, 1, 1] * 16)  # three segments
    found = run(terms, x, down, ups, adapters, interpret=True)
    assert error(found, formula(terms, x, down, ups, adapters)) < 8e-3


def test_the_reference_is_the_formula_with_its_gradients(rng):
    terms, x, down, ups, adapters = problem(rng, 5, 3, (16, 8), dtype=jnp.float32)
    found = add_low_rank(terms, x, down, ups, adapters)
    assert error(found, formula(terms, x, down, ups, adapters)) < 1e-5

    def loss(x, down, ups, dense):
        if not dense:
            return (add_low_rank(terms, x, down, ups, adapters).sum(0) ** 2).sum()
        own = (adapters[:, None] == jnp.arange(1, 4)[None, :]).astype(x.dtype)
        inner = jnp.einsum("mk,akr,ma->mar", x, down, own).reshape(5, 3, 2, -1)
        change = [jnp.einsum("mar,arn->mn", inner[:, :, i], up) for i, up in enumerate(ups)]
        return ((terms.sum(0) + jnp.concatenate(change, -1)) ** 2).sum()

    grads = [jax.grad(loss, (0, 1, 2))(x, down, ups, dense) for dense in (False, True)]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_gradients_of_the_kernels_are_those_of_the_reference(rng, interpreted_triton):
    terms, x, down, ups, adapters = problem(rng, 3, 2, (16, 8))

    def loss(x, down, ups, implementation):
        found = add_low_rank(terms, x, down, ups, adapters, implementation=implementation)
        return (found.sum(0) ** 2).sum()

    grads = [jax.grad(loss, (0, 1, 2))(x, down, ups, name) for name in ("triton", "reference")]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        assert np.abs(one - other).mean() < 2e-2 * np.abs(other).mean()


@pytest.mark.parametrize("rows", [3, in_sweep(20), in_sweep(STEP_ROWS + 3)])
def test_fused_changes_are_those_of_separate_operations(rng, interpreted_triton, rows):
    """Few rows share the product's launch; the activation adds the changes of gate and up."""
    _, x, down, ups, adapters = problem(rng, rows, 2, (40, 40), channels=256)
    weight = quantize(random(rng, 256, 80, dtype=jnp.float32), "uint4:g128")
    arrays = x, weight, down, ups, adapters.at[:3].set(jnp.asarray([2, 0, 1]))
    expected = formula((x @ weight.dequantize(x.dtype))[None], x, down, ups, arrays[-1])
    assert error(matmul_low_rank_terms(*arrays), expected) < 8e-3
    gate, up = np.split(expected, 2, -1)
    found = gated_low_rank(*arrays, activation="silu")
    assert error(found[None], gate / (1 + np.exp(-gate)) * up) < 8e-3


def test_gradients_of_fused_changes_are_those_of_separate_operations(rng, interpreted_triton):
    _, x, down, ups, adapters = problem(rng, 3, 2, (16, 16), channels=128)
    weight = quantize(random(rng, 128, 32, dtype=jnp.float32), "uint4:g128")

    def loss(x, down, ups, is_fused):
        if is_fused:
            found = gated_low_rank(x, weight, down, ups, adapters, activation="silu")
            return (found.astype(jnp.float32) ** 2).sum()
        terms = add_low_rank(matmul_terms(x, weight), x, down, ups, adapters)
        return (gated(terms, "silu", dtype=x.dtype).astype(jnp.float32) ** 2).sum()

    grads = [jax.grad(loss, (0, 1, 2))(x, down, ups, is_fused) for is_fused in (True, False)]
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        assert np.abs(one - other).mean() < 2e-2 * np.abs(other).mean()


def test_segments_are_rows_of_one_adapter():
    adapters = jnp.asarray([3, 0, 1] + [3] * 17)
    found = Segments.of(adapters, 4)
    assert found.adapters.tolist() == [3, 1, 3, 0, 0]
    rows = [[row for row in segment if row < 20] for segment in found.rows.tolist()]
    assert rows == [[0, *range(3, 18)], [2], [18, 19], [], []]


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_a_gpu_runs_kernels_in_place(rng, lower_for_cuda, rows):
    shape = jax.ShapeDtypeStruct
    sizes = 4096, 1024, 1024
    arguments = (
        *(shape((1, rows, 6144), jnp.bfloat16), shape((rows, 4096), jnp.bfloat16)),
        shape((16, 4096, 48), jnp.bfloat16),
        [shape((16, 16, size), jnp.bfloat16) for size in sizes],
        shape((rows,), jnp.int32),
    )
    text = lower_for_cuda(add_low_rank, *arguments)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
    assert "output_operand_alias" in text  # in place


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_few_rows_have_two_kernels_with_their_product(lower_for_cuda, rows):
    """One computes x · weight and x · down; the other adds, or is also the activation."""
    shape = jax.ShapeDtypeStruct
    arrays = (
        shape((rows, 1024), jnp.bfloat16),
        jax.eval_shape(lambda w: quantize(w, "uint4:g128"), shape((1024, 2048), jnp.float32)),
        shape((16, 1024, 32), jnp.bfloat16),
        [shape((16, 16, 1024), jnp.bfloat16)] * 2,
        shape((rows,), jnp.int32),
    )
    for fused in (matmul_low_rank_terms, functools.partial(gated_low_rank, activation="silu")):
        text = lower_for_cuda(fused, *arrays)
        assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


def test_what_does_not_fit_is_an_error(rng):
    terms, x, down, ups, adapters = problem(rng, 2, 2, (16, 8))
    for wrong in (
        (terms[0], x, down, ups, adapters),
        (terms, x[:, 1:], down, ups, adapters),
        (terms, x, down, ups[:1], adapters),
        (terms, x, down, [], adapters),
        (terms, x, down, ups, adapters[1:]),
        (terms, x, down, ups, adapters.astype(jnp.float32)),
    ):
        with pytest.raises(ValueError, match=r"expected \[splits"):
            add_low_rank(*wrong)
    weight = quantize(jnp.ones((160, 24)), "uint4:g32")
    with pytest.raises(ValueError, match="expected silu or gelu, and two equal shapes"):
        gated_low_rank(x, weight, down, ups, adapters, activation="silu")
    with pytest.raises(UnsupportedError, match="one dtype"):
        add_low_rank(terms, x.astype(jnp.float32), down, ups, adapters, implementation="triton")
