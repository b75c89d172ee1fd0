from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks, quantize_activations
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.maps import Fold
from mpjax.models.mlp import RoutedInputs
from mpjax.quantization.blocks import (
    BlockRule,
    block_errors,
    choose_widths,
    in_order,
    is_folded,
    order_of,
    permuted,
)
from mpjax.quantization.statistics import Statistics
from tests.models.small import small_config


@pytest.fixture
def inputs(rng):
    """300 channels, of which four outliers in different blocks are thirty times as large."""
    x = rng.standard_normal((1, 200, 300)).astype(np.float32)
    x[..., [3, 130, 200, 290]] *= 30
    return x


def statistics_of(x):
    return Statistics.of(jnp.asarray(x), jnp.ones(x.shape[:2], bool), 200)


def test_the_largest_channels_come_first(inputs):
    statistics = statistics_of(inputs)
    order = np.asarray(order_of(statistics))
    assert set(order[:4]) == {3, 130, 200, 290}
    assert sorted(order) == list(range(300))
    moved, expected = permuted(statistics, order), statistics_of(inputs[..., order])
    for name in ("products", "magnitudes", "largest", "smallest", "samples"):
        np.testing.assert_allclose(
            getattr(moved, name), getattr(expected, name), rtol=1e-5, atol=1e-4
        )


def test_errors_of_blocks_are_those_of_their_products(inputs, rng):
    weight = rng.standard_normal((300, 40)).astype(np.float32)
    found = np.asarray(block_errors(jnp.asarray(weight), statistics_of(inputs)))
    assert found.shape == (2, 3)
    x = inputs[0].astype(np.float64)
    for bits, row in zip((4, 8), found, strict=True):
        blocks = ActivationBlocks(jnp.full(3, bits, jnp.uint8))
        lost = np.asarray(quantize_activations(jnp.asarray(inputs[0]), blocks).dequantize()) - x
        for block, error in enumerate(row):
            rows = slice(128 * block, 128 * (block + 1))
            expected = ((lost[:, rows] @ weight[rows]) ** 2).sum() / ((x @ weight) ** 2).sum()
            np.testing.assert_allclose(error, expected, rtol=1e-3)


def test_one_wide_block_of_sorted_channels_does_nearly_all(inputs, rng):
    """The point of COMET's §3.2."""
    weight = jnp.asarray(rng.standard_normal((300, 40)), jnp.float32)
    statistics = statistics_of(inputs)
    order = order_of(statistics)
    plain = np.asarray(block_errors(weight, statistics))
    sorted_ = np.asarray(block_errors(weight[order], permuted(statistics, order)))

    def error(found, rule):
        bits = choose_widths({"a": rule}, {"a": found})["a"]
        assert (bits == 8).sum() == (0 if rule.one_in == 0 else 1)
        return np.where(bits == 8, found[1], found[0]).sum()

    one, none = BlockRule(3), BlockRule(0)
    assert error(sorted_, one) < 0.1 * error(plain, one)
    assert error(sorted_, one) < 0.1 * error(sorted_, none)


ERRORS = {
    "a": np.array([[1.0, 8.0, 2.0], [0.5, 0.5, 0.5]]),
    "b": np.array([[4.0, 1.0, 9.0], [1.0, 1.0, 1.0]]),
}


@pytest.mark.parametrize(
    ("one_in", "expected"),
    [
        (0, ([4, 4, 4], [4, 4, 4])),
        (1, ([8, 8, 8], [8, 8, 8])),
        (2, ([4, 8, 4], [8, 4, 8])),
        (3, ([4, 8, 4], [4, 4, 8])),
        (100, ([4, 4, 4], [4, 4, 8])),
    ],
)
def test_a_share_goes_to_the_blocks_that_gain_most(one_in, expected):
    found = choose_widths(dict.fromkeys(ERRORS, BlockRule(one_in)), ERRORS)
    assert tuple(bits.tolist() for bits in found.values()) == expected


@pytest.mark.parametrize(
    ("limit", "wide"), [(20.0, []), (4.0, [1]), (2.4, [1, 2]), (0.1, [0, 1, 2])]
)
def test_an_error_is_a_budget_of_each_map(limit, wide):
    rules = {"a": BlockRule(error=limit), "b": BlockRule(0)}
    found = choose_widths(rules, ERRORS)
    assert np.flatnonzero(found["a"] == 8).tolist() == wide
    assert (found["b"] == 4).all()


def test_each_expert_is_a_map_of_its_own():
    """The last expert saw no token: nothing is known of its blocks."""
    experts = np.stack([ERRORS["a"], ERRORS["b"], np.full((2, 3), np.nan)], 1)
    found = choose_widths({"e": BlockRule(3)}, {"e": experts})["e"]
    assert found.tolist() == [[4, 8, 4], [4, 4, 8], [8, 8, 8]]
    found = choose_widths({"e": BlockRule(error=4.0)}, {"e": experts})["e"]
    assert found.tolist() == [[4, 8, 4], [8, 4, 8], [8, 8, 8]]


def test_experts_have_orders_of_their_own(inputs):
    routed = RoutedInputs(jnp.asarray(inputs), jnp.asarray(np.arange(200) % 2)[None, :, None], 3)
    found = Statistics.of_experts(routed, jnp.ones((1, 200), bool), 16)
    order, moved = in_order(found)
    assert order.shape == (3, 300)
    for expert in range(2):
        own = statistics_of(inputs[:, expert::2])
        np.testing.assert_array_equal(order[expert], order_of(own))
        np.testing.assert_allclose(
            moved.products[expert], permuted(own, order[expert]).products, rtol=1e-5, atol=1e-3
        )
    np.testing.assert_array_equal(order[2], np.arange(300))  # no token went there
    last = jax.tree.map(lambda leaf: leaf[2], moved)
    assert np.isnan(block_errors(jnp.ones((300, 8)), last)).all()


@pytest.mark.parametrize("has_gate", [False, True])
def test_values_move_only_where_no_gate_multiplies_them(has_gate):
    [fold] = GroupedQuerySpec(output_gate=has_gate).folds(small_config(head_dim=128))
    assert is_folded(fold) != has_gate


def test_channels_of_heads_are_sorted_alike_in_their_copies(rng):
    x = rng.standard_normal((1, 50, 2 * 3 * 128)).astype(np.float32)
    x[..., [3, 128 + 3, 384 + 70]] *= [9, 1, 30]  # the last of the second head's first copy
    fold = Fold("output", "qkv", 2, (2, 3, 128), is_mixable=True)
    assert is_folded(fold)
    assert not is_folded(Fold("output", "qkv", 2, (2, 3, 64), is_mixable=True))
    assert is_folded(Fold("down", "gate_up", 1, is_elementwise=True))
    order, moved = in_order(statistics_of(x), fold)
    heads = np.asarray(order).reshape(2, 3, 128)
    assert sorted(heads[1, 2]) == list(range(5 * 128, 6 * 128))
    assert (heads[:, :, 0] % 128).tolist() == [[3] * 3, [70] * 3]
    np.testing.assert_array_equal(heads % 128, np.broadcast_to(heads[:, :1] % 128, heads.shape))
    np.testing.assert_allclose(moved.magnitudes, np.abs(x).sum((0, 1))[order], rtol=1e-5)
