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
    ExpertMLP,
    Gate,
    expert_mlp_terms,
    grouped_matmul,
    quantize,
    quantize_activations,
)
from mpjax.kernels.experts import counting, mlp, rounding, triton, warpgroups
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.kernels import in_packed_order
from mpjax.kernels.experts.tiles import Tiles, sorted_by_expert
from mpjax.kernels.rowwise import blocks as kernels
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.experts.test_triton import config_of, dense, stack
from tests.pallas_kernels.marks import interpreted_here
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide
from tests.pallas_kernels.rowwise.test_blocks import assert_alike
from tests.sweeps import in_sweep

on_gpu = pytest.param(False, marks=pytest.mark.gpu)
CHOSEN = ROUTINGS["mixed"]


def blocks_of(rng: np.random.Generator, channels: int, *, permuted: bool) -> ActivationBlocks:
    """Of experts whose widths differ, and whose orders do if channels are permuted."""
    bits = rng.choice([4, 8], (EXPERTS, -(-channels // 128))).astype(np.uint8)
    bits[0, :2], bits[1, :2] = [4, 8][: bits.shape[1]], [8, 4][: bits.shape[1]]
    order = rng.permuted(np.tile(np.arange(channels, dtype=np.int32), (EXPERTS, 1)), axis=1)
    return ActivationBlocks(jnp.asarray(bits), jnp.asarray(order) if permuted else None)


def mixed(weight: Any, blocks: ActivationBlocks) -> Any:
    """A stack whose matrix stays the same, in the order of blocks."""
    return dataclasses.replace(weight, activation_bits=blocks.bits, permutation=blocks.permutation)


def row_by_row(x: np.ndarray, blocks: ActivationBlocks, experts: np.ndarray) -> np.ndarray:
    """Rows [rows, K], of x [rows, K], rounded by their experts' blocks, in the order of K."""
    found = []
    for row, expert in zip(x, experts, strict=True):
        own = jax.tree.map(lambda array, i=expert: array[i], blocks)
        values = wide(quantize_activations(jnp.asarray(row, jnp.float32), own).dequantize())
        if own.permutation is not None:
            values = values[np.argsort(np.asarray(own.permutation))]
        found.append(values)
    return np.stack(found)


@pytest.mark.parametrize("interpret", [True, on_gpu])
@pytest.mark.parametrize(
    ("channels", "permuted", "per_row"), [(300, True, 2), in_sweep(1200, False, 1)]
)
def test_each_row_has_the_blocks_of_its_expert(channels, permuted, per_row, interpret, rng):
    blocks = blocks_of(rng, channels, permuted=permuted)
    x = random_array(rng, (10 // per_row, channels), "bfloat16")
    experts = jnp.asarray(CHOSEN.reshape(-1)).at[3].set(-1)  # a tile that is not used
    found = kernels.quantize_rows_of_experts(x, blocks, experts, interpret=interpret)
    assert_alike(found, rounding.reference(x, blocks, experts))
    rows = np.repeat(wide(x), per_row, 0)
    exact = row_by_row(rows, blocks, np.maximum(np.asarray(experts), 0))
    values = wide(found.dequantize())
    if permuted:
        order = np.asarray(blocks.permutation)[np.maximum(np.asarray(experts), 0)]
        values = np.take_along_axis(values, np.argsort(order, 1), 1)
    assert relative_error(values, exact) < 2e-3


@pytest.mark.parametrize("interpret", [True, on_gpu])
def test_rows_may_come_from_anywhere(interpret, rng):
    blocks = blocks_of(rng, 128, permuted=True)
    x = random_array(rng, (3, 128), "bfloat16")
    experts, sources = jnp.asarray([4, -1, 0, 2, 2]), jnp.asarray([2, 2, 0, 1, 0])
    found = kernels.quantize_rows_of_experts(x, blocks, experts, sources, interpret=interpret)
    assert_alike(found, rounding.reference(x, blocks, experts, sources))
    assert_alike(found, rounding.reference(x[sources], blocks, experts))


@pytest.mark.parametrize("interpret", [True, on_gpu])
def test_products_of_all_mixtures_of_widths(interpret, rng):
    """Each expert reads the channels in its own order; the last block is not whole."""
    weight = stack(rng, "int4:g128/int8", 320, 48)
    blocks = blocks_of(rng, 320, permuted=True)
    ordered = mixed(weight, blocks)
    x, experts = random_array(rng, (5, 320), "bfloat16"), jnp.asarray(CHOSEN)
    rows, plain = in_packed_order(x, ordered, experts, None)
    tiles = sorted_by_expert(experts, EXPERTS, 16)
    config = config_of("int4:g128/int8", 2)
    run = functools.partial(triton.products, out_dtype=jnp.dtype("float32"))
    found = run(rows, plain, tiles, Epilogue(), config, interpret=interpret).sum(0)
    rounded = row_by_row(np.repeat(wide(x), 2, 0), blocks, CHOSEN.reshape(-1)).reshape(5, 2, -1)
    whole = expected(rounded, dense(ordered), CHOSEN)
    assert relative_error(found.reshape(whole.shape), whole) < GATES["bfloat16"]
    reference = grouped_matmul(x, ordered, experts, implementation="reference")
    assert relative_error(reference, whole) < GATES["bfloat16"]


@pytest.mark.sweep
@interpreted_here
def test_rows_in_the_order_of_experts_have_their_widths(rng, monkeypatch):
    """Between the products of warpgroups, rows of tiles that are not used have any."""
    for module, name in ((warpgroups, "of_tiles"), (counting, "counted")):
        launch = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(mlp, "why_not", lambda *arguments: None)
    text = "int4:g128/int8"
    given = ExpertMLP(
        mixed(stack(rng, text, 256, 256), blocks_of(rng, 256, permuted=True)),
        mixed(stack(rng, text, 128, 64), blocks_of(rng, 128, permuted=False)),
    )
    x, weights = random_array(rng, (5, 256), "bfloat16"), random_array(rng, (5, 2), "float32")
    run = functools.partial(expert_mlp_terms, x, given, jnp.asarray(CHOSEN), weights)
    expected = run(implementation="reference").sum(0)
    assert relative_error(run(implementation="mosaic")[0], expected) < GATES["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 1024])
def test_a_layer_on_the_gpu(tokens, rng):
    """By the kernels that plans choose: without sorting, sorted, and by warpgroups."""
    given = ExpertMLP(
        mixed(stack(rng, "int4:g128/int8", 512, 768), blocks_of(rng, 512, permuted=True)),
        mixed(stack(rng, "int4:g128/int8", 384, 512), blocks_of(rng, 384, permuted=False)),
    )
    chosen = jnp.asarray(rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :2])
    x, weights = (random_array(rng, (tokens, size), "bfloat16") for size in (512, 2))
    run = functools.partial(expert_mlp_terms, x, given, chosen, weights)
    expected = run(implementation="reference").sum(0)
    assert relative_error(run().sum(0), expected) < GATES["bfloat16"]


def test_rows_of_tiles_that_are_not_used_come_from_some_row(rng, monkeypatch):
    """Their pairs are memory that nobody has written: any number."""
    weight = mixed(stack(rng, "int4:g128/int8", 256, 64), blocks_of(rng, 256, permuted=True))
    numbers = jnp.asarray([[0, 3], [-(2**31), 2**31 - 1]], jnp.int32)
    tiles = Tiles(jnp.asarray([1, -1], jnp.int32), numbers, 6)
    taken = []
    monkeypatch.setattr(rounding, "round_to_blocks", lambda *given: taken.append(given))
    rounding.round_in_tiles(jnp.zeros((3, 256), "bfloat16"), weight, tiles, tiles.expert)
    [(_, _, _, sources)] = taken
    np.testing.assert_array_equal(sources, [0, 1, 0, 2])


@pytest.mark.one_of(2)
@pytest.mark.parametrize("tokens", [1, 64, 1024])
def test_a_layer_lowers_without_a_copy_of_x(tokens, lower_for_cuda, pretend_gpu):
    shape: Any = jax.ShapeDtypeStruct

    def struct(channels: int, outputs: int, *, permuted: bool) -> Any:
        plain = shape((16, channels, outputs), jnp.bfloat16)
        weight = jax.eval_shape(lambda w: quantize(w, "int4:g128/int8"), plain)
        order = shape((16, channels), jnp.int32) if permuted else None
        return mixed(weight, ActivationBlocks(shape((16, channels // 128), jnp.uint8), order))

    layer = ExpertMLP(
        struct(2048, 1536, permuted=True), struct(768, 2048, permuted=False), Gate(7.0, 1.7)
    )
    program = lower_for_cuda(
        expert_mlp_terms,
        shape((tokens, 2048), jnp.bfloat16),
        layer,
        shape((tokens, 4), jnp.int32),
        shape((tokens, 4), jnp.float32),
    )
    assert 'name = "quantize_rows_experts_blocks"' in program
    assert "x2048xi8>" in program
    assert f"tensor<{4 * tokens}x2048xbf16>" not in program
    copies = [line for line in program.splitlines() if "gather" in line and "xi8>" in line]
    assert not copies
    assert ("experts_warpgroups_int4" in program) == (tokens == 1024)
