from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import ProductFormat, quantize
from mpjax.kernels.experts.plans import Problem
from tests.pallas_kernels.experts.plans.problems import qwen3


def test_of_a_weight():
    plain = jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)
    packed = jax.eval_shape(lambda w: quantize(w, "uint4:g32"), plain)
    for weight, text in ((plain, "bfloat16"), (packed, "uint4:g32")):
        problem = Problem.of((5, 2), weight, gated=True)
        assert problem.format == ProductFormat.of(text)
        assert (problem.experts, problem.channels, problem.outputs) == (8, 128, 64)
        assert (problem.tokens, problem.per_token, problem.pairs) == (5, 2, 10)


def test_experts_that_are_hit():
    # E · (1 − (1 − k / E)^tokens)
    assert [qwen3(tokens).hit for tokens in (1, 4, 16, 64, 256)] == [8, 29, 82, 126, 128]
    assert qwen3(3, experts=8, per_token=8).hit == 8


def test_the_product_has_the_outputs_of_all_tiles():
    product = qwen3(16).product(8)
    assert (product.rows, product.channels, product.outputs) == (8, 2048, 82 * 1536)
    assert qwen3(4096).product(128).outputs == 256 * 1536
