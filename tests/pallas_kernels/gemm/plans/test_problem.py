from __future__ import annotations

import jax.numpy as jnp
import pytest

from mpjax.kernels import ProductFormat, device, quantize
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.problem import Problem
from tests.pallas_kernels.gemm.plans.problems import product


def test_it_is_of_a_weight_and_the_default_device():
    weight = quantize(jnp.ones((256, 64)), "uint4:g32")
    with device.described_as("NVIDIA A100", compute_capability=8.0, multiprocessors=108):
        problem = Problem.of(3, weight)
    limits = Limits(108, 8.0, "NVIDIA A100")
    assert problem == Problem(3, ProductFormat.of("uint4:g32"), 256, 64, limits)
    same = Problem(3, ProductFormat.of(weight.format), 256, 64, limits)
    assert len({problem, same}) == 1, "it is a key"


@pytest.mark.parametrize(("channels", "blocks"), [(256, 1), (4096, 16), (4097, 17)])
def test_k_is_padded_to_whole_blocks(channels, blocks):
    assert product(1, channels).blocks == blocks


@pytest.mark.parametrize(("text", "has_table"), [("uint4:g128", False), ("table3:g64", True)])
def test_codes_of_tables_are_looked_up(text, has_table):
    assert product(1, text=text).has_table == has_table
