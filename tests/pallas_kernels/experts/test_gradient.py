from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import Gate, grouped_matmul, grouped_matmul_terms, quantize
from mpjax.kernels.experts import reference
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gradient import differentiable
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS
from tests.pallas_kernels.oracles import random_array, relative_error, wide


def test_terms_have_the_gradient_of_their_sum(rng):
    """However many there are; also with codes, which have none."""
    experts = jnp.asarray(ROUTINGS["mixed"])
    weight = quantize(random_array(rng, (EXPERTS, 64, 8), "float32"), "table4:g32")
    x, weights = random_array(rng, (5, 64), "float32"), random_array(rng, (5, 2), "float32")

    def split(x, weight, experts, epilogue):
        whole = reference.products(x, weight, experts, epilogue).sum(1)
        return jnp.stack([0.25 * whole, 0.5 * whole, 0.25 * whole])

    def loss(x, weights, table, run):
        packed = dataclasses.replace(weight, table=table)
        found = run(x, packed, experts, Epilogue(None, None, weights))
        return (found.sum(0) ** 2).sum()

    def plain(x, weight, experts, epilogue):
        return jnp.moveaxis(reference.products(x, weight, experts, epilogue), 1, 0)

    given = x, weights, weight.table
    found = jax.grad(loss, (0, 1, 2))(*given, lambda *rest: differentiable(split, *rest))
    for one, other in zip(found, jax.grad(loss, (0, 1, 2))(*given, plain), strict=True):
        assert relative_error(one, wide(other)) < 1e-5
        assert np.abs(one).max() > 0


def test_the_kernel_has_the_gradients_of_the_reference(interpreted_triton, rng):
    weight = quantize(random_array(rng, (EXPERTS, 64, 64), "float32") / 8, "uint4:g32")
    down = quantize(random_array(rng, (EXPERTS, 32, 64), "float32") / 8, "uint4:g32")
    x, weights = random_array(rng, (5, 64), "bfloat16"), random_array(rng, (5, 2), "float32")

    def loss(x, weights, implementation):
        chosen = ROUTINGS["mixed"]
        gated = grouped_matmul(x, weight, chosen, gate=Gate(), implementation=implementation)
        terms = grouped_matmul_terms(gated, down, chosen, weights, implementation=implementation)
        return (terms.sum(0) ** 2).sum()

    grad = jax.grad(loss, (0, 1))
    for one, other in zip(grad(x, weights, "triton"), grad(x, weights, "reference"), strict=True):
        assert relative_error(one, wide(other)) < 0.02
