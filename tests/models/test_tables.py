from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Linear, tables

SHAPE = VOCABULARY, HIDDEN = 40, 64
TOKENS = jnp.array([[3, 39, 0], [3, 7, 7]])


@pytest.fixture
def plain(rng):
    return nnx.Param(jnp.asarray(rng.standard_normal(SHAPE), jnp.float32))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_random_table(is_packed):
    table = tables.create(is_packed, SHAPE, "bfloat16", nnx.Rngs(0))
    assert isinstance(table, Linear) == is_packed
    rows = tables.look_up(table, TOKENS, "bfloat16")
    assert (rows.shape, rows.dtype) == ((2, 3, HIDDEN), jnp.bfloat16)
    found = tables.logits(table, rows)
    assert (found.shape, found.dtype) == ((2, 3, VOCABULARY), jnp.float32)


@pytest.mark.parametrize("text", ["uint8:gK:sym", "uint4:g32", "table3:g64"])
def test_a_packed_table_computes_with_its_values(text, plain, rng, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 16)  # of which the last is not full
    packed = tables.pack(plain, WeightFormat.parse(text))
    kernel = packed.kernel.get_value()
    assert isinstance(kernel, QuantizedTensor)
    whole = quantize(plain.get_value().T, text)
    np.testing.assert_array_equal(kernel.words, whole.words)
    values = np.asarray(whole.dequantize()).T
    np.testing.assert_array_equal(tables.look_up(packed, TOKENS, "float32"), values[TOKENS])
    hidden = jnp.asarray(rng.standard_normal((2, HIDDEN)), jnp.float32)
    np.testing.assert_allclose(tables.logits(packed, hidden), hidden @ values.T, atol=1e-4)


def test_logits_of_16_bit_states_are_float32(plain, rng):
    packed = tables.pack(plain, WeightFormat.parse("uint8:gK"))
    hidden = jnp.asarray(rng.standard_normal((2, HIDDEN)), jnp.bfloat16)
    found = tables.logits(packed, hidden)
    assert found.dtype == jnp.float32
    assert not np.array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["uint8:gK:sym", "uint8:g128:sym", "uint4:g128", "float8:g128"])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_packed_table_on_the_gpu(text, rows, rng):
    table = nnx.Param(jnp.asarray(rng.standard_normal((5003, 256)), jnp.bfloat16))
    packed = tables.pack(table, WeightFormat.parse(text))
    kernel: Any = packed.kernel.get_value()
    values = np.asarray(kernel.dequantize()).astype(np.float64)
    tokens = jnp.asarray(rng.integers(0, 5003, rows))
    hidden = tables.look_up(packed, tokens, "bfloat16")
    np.testing.assert_array_equal(hidden, kernel.dequantize(jnp.bfloat16).T[tokens])
    found = np.asarray(tables.logits(packed, hidden))
    expected = np.asarray(hidden, np.float64) @ values
    assert np.abs(found - expected).mean() < 8e-3 * np.abs(expected).mean()


@pytest.mark.parametrize(
    ("scale", "text", "message"),
    [
        (1.0, "uint8:g128", "64 input channels can't be split into groups of 128"),
        (1e8, "table4:g64", "the table: the largest magnitude of the weights is .* too large"),
    ],
)
def test_what_can_not_be_packed(scale, text, message, plain):
    table = nnx.Param(plain.get_value() * np.float32(scale))
    with pytest.raises(ValueError, match=message):
        tables.pack(table, WeightFormat.parse(text))
