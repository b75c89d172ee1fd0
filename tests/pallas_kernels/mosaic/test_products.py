from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.mosaic import memory, products
from mpjax.kernels.mosaic.launch import Grid, give_registers, launch, take_registers


def multiply_kernel(
    x_ref, weights_ref, out_ref, *, x_tiles, weight_tiles, out_tiles, full, add_products
):
    """Sums of two products of two halves of weights each, of which the second counts twice."""

    @pl.when(jax.lax.axis_index("warpgroup") == 1)
    def _copy():
        give_registers()
        memory.copy_in(x_ref, x_tiles, full)
        memory.copy_in(weights_ref, weight_tiles, full)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _compute():
        take_registers(1)
        memory.wait(full)

        def operand(first):
            halves = [weight_tiles.at[:, pl.ds(first + half, 32)] for half in (0, 32)]
            loaded = [memory.load(half) for half in halves]
            return products.join(loaded)

        both = [
            products.Product(
                [functools.partial(operand, first), functools.partial(operand, first + 64)],
                [x_tiles.at[:, pl.ds(first, 64)], x_tiles.at[:, pl.ds(first + 64, 64)]],
            )
            for first in (0, 128)
        ]
        sums = memory.zeros((64, 16), jnp.float32)
        sums = add_products(sums, both, lambda sums, term, n: sums + (n + 1) * term)
        memory.store_transposed(out_tiles, sums)
        memory.copy_out(out_tiles, out_ref)
        memory.wait_for_stores()


def multiply(x: jax.Array, weights: jax.Array, *, add_products) -> jax.Array:
    return launch(
        functools.partial(multiply_kernel, add_products=add_products),
        x,
        weights,
        out_shape=jax.ShapeDtypeStruct((16, 64), jnp.float32),
        grid=Grid({"one": 1}, 1),
        scratch={
            "x_tiles": memory.shared((16, 256), jnp.bfloat16),
            "weight_tiles": memory.shared((64, 256), jnp.bfloat16, columns=32),
            "out_tiles": memory.shared((16, 64), jnp.float32),
            "full": memory.Barrier(num_arrivals=2),
        },
        name="multiply",
        interpret=False,
    )


each_way = pytest.mark.parametrize(
    "add_products",
    [
        products.add_products_overlapped,
        functools.partial(products.add_products, mma_sync=True, scratch=None),
        functools.partial(products.add_products, mma_sync=False, scratch=None),
    ],
    ids=["in turn", "now", "later"],
)


@each_way
def test_products_are_added(add_products, lower_for_cuda):
    run = functools.partial(multiply, add_products=add_products)
    x = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    assert "mosaic_gpu" in lower_for_cuda(run, x, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16))


@pytest.mark.gpu
@each_way
def test_products_are_added_on_the_gpu(add_products, rng, wgmma):
    x, weights = (rng.integers(-8, 9, (rows, 256)).astype(float) for rows in (16, 64))
    expected = x[:, :128] @ weights[:, :128].T + 2 * x[:, 128:] @ weights[:, 128:].T
    run = jax.jit(functools.partial(multiply, add_products=add_products))
    found = run(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(found), expected.astype(np.float32))
