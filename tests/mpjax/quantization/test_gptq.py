from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, grid
from mpjax.quantization.gptq import (
    ATTEMPTS,
    BLOCK,
    gptq,
    gptq_fresh,
    inverse_factor,
    why_not_fresh,
)
from mpjax.quantization.ranges import search_ranges
from mpjax.quantization.statistics import squared_error

FORMATS = ("uint4:g32", "uint4:g64:sym", "uint8:gK", "table3:g32", "float8:gK", "int8/int8")


def make_inputs(rng, channels: int, tokens: int = 512) -> np.ndarray:
    """Correlated inputs, some channels of them large."""
    mixed = rng.standard_normal((tokens, channels)) @ rng.standard_normal((channels, channels))
    return mixed / np.sqrt(channels) * np.exp(rng.standard_normal(channels))


def textbook(weight, hessian, fitted, damping, order):
    """GPTQ one row after another in float64, without blocks and with the inverse written out."""
    weight, hessian = np.array(weight, np.float64)[order], np.array(hessian, np.float64)
    damped = hessian + damping * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(damped[order][:, order])
    codes = np.zeros(weight.shape, np.float64)
    for index, channel in enumerate(order):
        row = fitted.row(int(fitted.group_of(channel)))
        found = row.nearest(jnp.asarray(weight[index], jnp.float32))
        codes[channel] = np.asarray(found.astype(jnp.float32))
        error = (weight[index] - np.asarray(row.decode(found))) / inverse[0, 0]
        weight[index:] -= np.outer(inverse[0], error)[: len(weight) - index]
        # The inverse without its first row and column, by one step of elimination.
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    return codes


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("channels", [64, BLOCK + 64])
def test_it_is_the_textbook_loop(rng, channels, is_ordered):
    x = make_inputs(rng, channels)
    hessian = (x.T @ x / len(x)).astype(np.float32)
    weight = rng.standard_normal((channels, 24)).astype(np.float32)
    fitted = grid.fit(jnp.asarray(weight), WeightFormat.parse("uint4:g32"))
    found = gptq(weight, hessian, fitted, is_ordered=is_ordered)
    order = np.argsort(-np.diag(hessian), kind="stable") if is_ordered else np.arange(channels)
    expected = textbook(weight, hessian, fitted, 0.01, order)
    # Float32 may round to the other neighbour now and then, and what follows makes up for it.
    assert (np.asarray(found.plain.codes) == expected).mean() > 0.99
    assert found.damping == np.float32(0.01)


def textbook_fresh(weight, hessian, format, order):
    """The same in float64; a group gets its grid when the loop comes to its first row."""
    weight, hessian = np.array(weight, np.float64)[order], np.array(hessian, np.float64)
    importance = jnp.asarray(np.diag(hessian)[order], jnp.float32)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(damped[order][:, order])
    values, size = np.zeros(weight.shape), format.group_size
    for index, channel in enumerate(order):
        if index % size == 0:
            rows = jnp.asarray(weight[index : index + size], jnp.float32)
            fitted = search_ranges(rows, importance[index : index + size], format).row(0)
        found = fitted.decode(fitted.nearest(jnp.asarray(weight[index], jnp.float32)))
        values[channel] = np.asarray(found)
        error = (weight[index] - values[channel]) / inverse[0, 0]
        weight[index:] -= np.outer(inverse[0], error)[: len(weight) - index]
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    return values


@pytest.mark.parametrize(
    ("text", "is_ordered"), [("uint4:g32", False), ("uint4:g32", True), ("table3:g32", True)]
)
def test_fresh_groups_are_those_of_the_textbook_loop(rng, text, is_ordered):
    x = make_inputs(rng, 160)
    hessian = (x.T @ x / len(x)).astype(np.float32)
    weight = rng.standard_normal((160, 24)).astype(np.float32)
    format = WeightFormat.parse(text)
    order = np.arange(160)
    if is_ordered:  # groups by their largest diagonal, and the rows of each by theirs
        diagonal = np.diag(hessian).reshape(-1, 32)
        groups = np.argsort(-diagonal.max(1), kind="stable")
        order = np.concatenate(
            [group * 32 + np.argsort(-diagonal[group], kind="stable") for group in groups]
        )
    found = gptq_fresh(weight, hessian, format, is_ordered=is_ordered).plain.dequantize()
    expected = textbook_fresh(weight, hessian, format, order)
    step = np.abs(weight).max() / 15
    assert (np.abs(found - expected) < 0.1 * step).mean() > 0.97
    fitted = search_ranges(weight, jnp.diagonal(jnp.asarray(hessian)), format)
    nearest = fitted.round(weight).dequantize()
    assert (np.abs(nearest - expected) < 0.1 * step).mean() < 0.8


def test_formats_whose_groups_share_scales_have_no_fresh_ones():
    formats = {text: why_not_fresh(WeightFormat.parse(text)) for text in FORMATS}
    assert [text for text, reason in formats.items() if reason] == ["float8:gK"]
    assert why_not_fresh(WeightFormat.parse("liquid4:g64/int8"))


@pytest.mark.parametrize("text", FORMATS)
def test_outputs_are_nearer_than_those_of_rounding_to_nearest(rng, text):
    x = make_inputs(rng, 128).astype(np.float32)
    hessian = jnp.asarray(x.T @ x / len(x))
    weight = jnp.asarray(rng.standard_normal((128, 16)), jnp.float32)
    fitted = grid.fit(weight, WeightFormat.parse(text))
    errors = [
        float(squared_error(plain.dequantize() - weight, hessian).sum())
        for plain in (fitted.round(weight), gptq(weight, hessian, fitted).plain)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_unseen_channels_are_rounded_to_nearest(rng):
    """The textbook sets them to zero; here they keep the values that other text may meet."""
    x = make_inputs(rng, 64).astype(np.float32)
    x[:, 7] = 0
    weight = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    fitted = grid.fit(weight, WeightFormat.parse("uint4:g32"))
    found = gptq(weight, x.T @ x, fitted).plain
    np.testing.assert_array_equal(found.codes[7], fitted.round(weight).codes[7])


def test_a_singular_hessian_gets_more_damping(rng):
    """The Hessian is of fewer inputs than channels, whose sizes are very different."""
    x = make_inputs(rng, 96, tokens=8).astype(np.float32) * np.logspace(-6, 6, 96, dtype=np.float32)
    factor, damping = inverse_factor(jnp.asarray(x.T @ x), 1e-9)
    assert jnp.isfinite(factor).all()
    assert 1e-9 < damping <= 1e-9 * 10**ATTEMPTS


def test_without_a_factor_codes_are_the_nearest(rng):
    weight = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    fitted = grid.fit(weight, WeightFormat.parse("uint4:g32"))
    found = gptq(weight, -jnp.eye(64), fitted)
    assert jnp.isnan(found.damping)
    np.testing.assert_array_equal(found.plain.codes, fitted.round(weight).codes)
