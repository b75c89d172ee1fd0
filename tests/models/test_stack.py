from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, quantize
from mpjax.models import Linear
from mpjax.models.stack import alternating, halves_of, stack, unstack
from tests.pallas_kernels.oracles import random_array

NAMES = tuple(f"experts.{expert}.{part}" for expert in range(3) for part in ("gate", "up"))


def maps(rng, *formats: str) -> list[Linear]:
    """Gate and up of three experts, in the format of each expert."""
    return [
        Linear(quantize(random_array(rng, (64, 8), "float32"), text), jnp.full(8, float(index)))
        for index, text in enumerate(text for text in formats for _ in range(2))
    ]


def kernel_of(linear: Linear) -> Any:
    return linear.kernel.get_value()


@pytest.mark.parametrize("text", ["bfloat16", "uint4:g32", "int8/int8"])
def test_experts_are_joined_and_stacked(text, rng):
    given = maps(rng, text, text, text)
    stacked = stack(iter(given), NAMES, 2)
    assert kernel_of(stacked).shape == (3, 64, 16)
    assert stacked.bias is not None
    np.testing.assert_array_equal(stacked.bias.get_value()[:, ::8], [[0, 1], [2, 3], [4, 5]])
    for expert, one in enumerate(unstack(stacked, 3)):
        halves = [kernel_of(each) for each in given[2 * expert : 2 * expert + 2]]
        dense = [half.dequantize() if hasattr(half, "dequantize") else half for half in halves]
        kernel = kernel_of(one)
        found = kernel.dequantize() if isinstance(kernel, QuantizedTensor) else kernel
        np.testing.assert_array_equal(found, jnp.concatenate(dense, 1))


def test_an_expert_is_written_before_the_next_is_taken(rng):
    given, taken = maps(rng, *["uint4:g32"] * 3), []

    def take():
        for index, each in enumerate(given):
            taken.append(index)
            yield each

    source = take()
    stack(source, NAMES[:4], 2)
    assert taken == [0, 1, 2, 3]


def test_one_expert_with_zero_points_makes_all_have_them(rng):
    given = maps(rng, "uint4:g32:sym", "uint4:g32", "uint4:g32:sym")
    kernel = kernel_of(stack(given, NAMES, 2))
    assert str(kernel.format) == "uint4:g32"
    dense = jax.tree.map(lambda leaf: leaf[2], kernel).dequantize()[:, :8]
    np.testing.assert_array_equal(dense, kernel_of(given[4]).dequantize())


def test_formats_that_differ_are_refused_by_name(rng):
    with pytest.raises(
        ValueError, match=r"^experts\.1\.gate is uint8:g32 .*, and experts\.0\.gate is uint4:g32"
    ):
        stack(maps(rng, "uint4:g32", "uint8:g32", "uint4:g32"), NAMES, 2)
    mixed = maps(rng, "uint4:g32")[:1] + maps(rng, "uint8:g32")[:1]
    with pytest.raises(ValueError, match=r"^experts\.0\.gate and experts\.0\.up have the formats"):
        stack(mixed, NAMES[:2], 2)


@pytest.mark.parametrize("text", ["bfloat16", "uint4:g32", "liquid4:g64/int8"])
def test_outputs_that_alternate_become_halves(text, rng):
    linear = Linear(quantize(random_array(rng, (64, 6), "float32"), text), jnp.arange(6.0))

    def dense(linear):
        kernel = kernel_of(linear)
        return kernel.dequantize() if isinstance(kernel, QuantizedTensor) else kernel

    halves = halves_of(linear)
    np.testing.assert_array_equal(halves.bias.get_value(), [0, 2, 4, 1, 3, 5])
    np.testing.assert_array_equal(dense(halves), dense(linear)[:, jnp.array([0, 2, 4, 1, 3, 5])])
    again = alternating(halves)
    np.testing.assert_array_equal(dense(again), dense(linear))
    np.testing.assert_array_equal(again.bias.get_value(), jnp.arange(6.0))
