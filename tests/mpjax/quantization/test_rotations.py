from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.quantization.rotations import rotate_embedding, rotate_head, rotate_layer, rotation
from tests.models.small import small_config, small_model


@pytest.mark.parametrize("size", [1, 16, 48, 45])
def test_rotations_are_orthogonal_and_mix(size):
    found = rotation(size, 0)
    np.testing.assert_allclose(found @ found.T, np.eye(size), atol=1e-12)
    power = size & -size
    assert (np.abs(found).max() <= 1 / np.sqrt(power) + 1e-12).all()
    assert not np.array_equal(found, rotation(size, 1)) or size == 1


@pytest.mark.parametrize("biases", [(), ("qkv_bias", "output_bias", "mlp_bias")])
def test_a_model_computes_what_it_computed(rng, biases):
    config = small_config(**dict.fromkeys(biases, True))
    model = small_model(config)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 7)))
    expected = model(tokens)
    stream = jnp.asarray(rotation(config.hidden_size, 0), jnp.float32)
    values = jnp.asarray(rotation(config.head_dim, 1), jnp.float32)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model.layers[0]))]
    for layer in model.layers:
        rotate_layer(layer, stream, values, config)
    head = (model.embedding if model.head is None else model.head).get_value()
    norm = model.norm.weight.get_value()
    model.head = nnx.data(None)
    model.head = nnx.Param(rotate_head(head, norm, stream))
    model.norm.weight.set_value(jnp.ones_like(norm))
    model.embedding.set_value(rotate_embedding(model.embedding.get_value(), stream))
    np.testing.assert_allclose(model(tokens), expected, rtol=2e-3, atol=2e-3)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model.layers[0]))]
    same = sum(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert same == bool(biases)  # that of gate and up, which the stream does not reach
