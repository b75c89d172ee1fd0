from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedTensor
from mpjax.models import Decoder, Packed
from mpjax.models.decoded import decoded, decoded_bytes
from tests.models.small import logits_of, quantize_kernels, small_config


def _model(format: str | None, **options) -> Decoder:
    model = Decoder(small_config(**{"dtype": "bfloat16"} | options), nnx.Rngs(0))
    return model if format is None else quantize_kernels(model, format)


def _kernels(model: Decoder) -> list:
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedTensor) or leaf.ndim == 2]


@pytest.mark.parametrize("format", ["uint4:g32", "table3:g32", None])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_float32_and_logits_stay(format, tied):
    model = _model(format, tie_word_embeddings=tied)
    before = [id(leaf) for leaf in jax.tree.leaves(model)]
    made = decoded(model)
    assert {kernel.dtype for kernel in _kernels(made)} == {jnp.dtype(jnp.float32)}
    assert decoded_bytes(model) == sum(kernel.nbytes for kernel in _kernels(made))
    assert [id(leaf) for leaf in jax.tree.leaves(model)] == before
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected, found = logits_of(model, tokens), logits_of(made, tokens)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02 * float(expected.std()))


@pytest.mark.parametrize("format", ["int8/int8", "uint4:g32"])
def test_what_meets_rounded_activations_stays_packed(format):
    made = decoded(_model(format))
    packed = [value for _, value in nnx.to_flat_state(nnx.state(made, Packed))]
    assert bool(packed) == (format == "int8/int8")
