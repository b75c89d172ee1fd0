from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import Decoder, GatedMLPSpec, LayerSpec
from mpjax.models.registry import FAMILIES
from mpjax.quantization.folds import linear_of
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.rotations import rotate_layer, rotate_tables, rotation
from tests.models.sharded_families import build
from tests.models.small import CONFIG, small_config, small_mixture, small_model


@pytest.mark.parametrize("size", [1, 16, 48, 45])
def test_rotations_are_orthogonal_and_mix(size):
    found = rotation(size, 0)
    np.testing.assert_allclose(found @ found.T, np.eye(size), atol=1e-12)
    power = size & -size
    assert (np.abs(found).max() <= 1 / np.sqrt(power) + 1e-12).all()
    assert not np.array_equal(found, rotation(size, 1)) or size == 1


def leaves_of(module):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(module))]


@pytest.mark.parametrize(
    ("changes", "unchanged"),
    [
        ({}, 0),
        ({"tie_word_embeddings": True, "qk_norm": True}, 2),  # the norms of queries and keys
        # The bias of gate and up, which the stream does not reach.
        ({"qkv_bias": True, "output_bias": True, "mlp_bias": True}, 1),
    ],
)
def test_a_model_computes_what_it_computed(changes, unchanged, rng):
    config = small_config(**changes)
    model = small_model(config)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, 7)))
    expected, before = model(tokens), leaves_of(model.layers[0])
    recipe = Recipe.of("W16A16KV16", "rotate+rtn")
    quantize_decoder(model, lambda number: (model.layers[number], False), (), recipe)
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-4, atol=1e-4)
    after = leaves_of(model.layers[0])
    assert sum(map(np.array_equal, before, after)) == unchanged
    assert not model.config.tie_word_embeddings
    assert all(np.array_equal(norm, np.ones_like(norm)) for norm in leaves_of(model.norm))


@pytest.mark.parametrize("kind", ["mixture", "shared", "NemotronHForCausalLM"])
def test_layers_of_other_kinds_compute_what_they_computed(kind, rng):
    model = build(kind) if kind in FAMILIES else small_mixture(kind == "shared")
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (2, 7)))
    expected = np.asarray(model(tokens))
    recipe = Recipe.of("W16A16KV16", "rotate+rtn")
    quantize_decoder(model, lambda number: (model.layers[number], False), (), recipe)
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-3, atol=1e-3)
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        for norm in spec.pre_norms.values():
            assert (getattr(layer, norm).weight.get_value() == 1).all()


def test_a_layer_that_is_not_as_its_spec_says_is_refused(monkeypatch):
    assert CONFIG.layers[0].writers(CONFIG) == ("attention.output", "mlp.down")
    monkeypatch.setattr(LayerSpec, "writers", lambda self, config: ("mlp.down",))
    with pytest.raises(ValueError, match="a rotation changes what the layer computes by"):
        rotate_layer(small_model().layers[0], CONFIG.layers[0], CONFIG)


def test_a_layer_in_16_bits_that_adds_little_is_rotated():
    config = small_config(dtype="bfloat16")
    layer = small_model(config).layers[0]
    for path in config.layers[0].writers(config):
        kernel = linear_of(layer, path).kernel
        kernel.set_value(kernel.get_value() * jnp.bfloat16(0.01))
    rotate_layer(layer, config.layers[0], config)


def test_a_norm_with_unknown_readers_is_refused(monkeypatch):
    monkeypatch.setattr(GatedMLPSpec, "readers", lambda self, config: ())
    with pytest.raises(ValueError, match="nothing says all that reads mlp_norm: leave rotate out"):
        rotate_layer(small_model().layers[0], CONFIG.layers[0], CONFIG)


def test_packed_tables_are_refused():
    model: Decoder = small_model()
    model.pack_table("head", "uint8:gK:sym")
    with pytest.raises(ValueError, match="head is packed: load it in 16 bits"):
        rotate_tables(model)
