from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import ProductFormat, quantize
from mpjax.kernels.experts.plans import OPERATION, Problem
from mpjax.kernels.experts.plans.rule import config_by_rule
from mpjax.kernels.experts.plans.warpgroup_rule import expected_tiles, suits_warpgroups
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


def test_a_part_of_the_experts_has_its_part_of_the_tokens():
    """A device of four plans the tiles that one device with all experts has for each of them."""
    for tokens in (16, 512, 4096):
        whole, part = qwen3(tokens), qwen3(tokens, held_experts=32)
        assert (part.own_pairs, part.pairs) == (whole.pairs // 4, whole.pairs)
        assert part.hit == pytest.approx(whole.hit / 4, abs=1)
        assert config_by_rule(part).tile_m == config_by_rule(whole).tile_m
        assert suits_warpgroups(part) == suits_warpgroups(whole)
        assert expected_tiles(part, 64) == pytest.approx(expected_tiles(whole, 64) / 4)
        assert OPERATION.key_of(part) == OPERATION.key_of(whole)


def test_more_experts_of_a_token_than_the_stack_has():
    weight = jax.ShapeDtypeStruct((2, 128, 64), jnp.bfloat16)
    for total, hit in ((None, 2), (8, 2), (1, 2)):
        assert Problem.of((100001, 8), weight, gated=False, total=total).hit == hit
