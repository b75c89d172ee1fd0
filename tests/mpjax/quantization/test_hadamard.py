from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.kernels import WeightFormat, hadamard
from mpjax.models import ExpertsSpec, GatedMLPSpec, GroupedQuerySpec, LayerSpec
from mpjax.models.division import Division
from mpjax.models.parameters import NAMES, linear_places
from mpjax.quantization.api import FinishedLayers
from mpjax.quantization.hadamard import block_of, check_blocks
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.recipe import Recipe
from tests.models.small import small_config, small_mixture, small_model


def mixed(model, method="hadamard+rtn", precision="W16A16KV16"):
    model = nnx.clone(model)
    recipe = Recipe.of(precision, method)
    quantize_decoder(model, lambda number: (model.layers[number], False), (), recipe)
    return model


@pytest.mark.parametrize("method", ["hadamard+rtn", "rotate+hadamard+rtn"])
def test_a_model_computes_what_it_computed(method, rng):
    model = small_model(small_config(mlp_bias=True, intermediate_size=96))
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (2, 7)))
    found = mixed(model, method)
    np.testing.assert_allclose(found(tokens), model(tokens), rtol=1e-3, atol=1e-3)
    assert found.config.hadamard_blocks == (32, 32)
    assert model.config.hadamard_blocks == (None, None)
    if method.startswith("hadamard"):
        down = model.layers[1].mlp.down.kernel.get_value()
        rows = found.layers[1].mlp.down.kernel.get_value()
        np.testing.assert_allclose(hadamard(down.T, 32).T, rows, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_computes_what_it_computed(shared, rng):
    """The experts' blocks are those of the shared MLP: 32 divides 32 and 96 channels."""
    model = small_mixture(shared)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (2, 7)))
    found = mixed(model)
    np.testing.assert_allclose(found(tokens), model(tokens), rtol=1e-3, atol=1e-3)
    assert found.config.hadamard_blocks == (32,)
    mlps = [(it.layers[0].mlp.experts, it.layers[0].mlp.shared) for it in (model, found)]
    for before, after in list(zip(*mlps, strict=True))[: 1 + shared]:
        rows = before.down.kernel.get_value().swapaxes(-1, -2)
        mixed_rows = after.down.kernel.get_value().swapaxes(-1, -2)
        np.testing.assert_allclose(hadamard(rows, 32), mixed_rows, atol=1e-5)
        assert np.abs(rows - mixed_rows).max() > 0.1
    # Statistics are measured on what the maps read.
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    before, after = (it.layers[0].mlp.inputs(x)["experts.down"].x for it in (model, found))
    np.testing.assert_allclose(hadamard(before, 32), after, rtol=1e-4, atol=1e-5)


def test_blocks():
    sizes = {96: 32, 128: 128, 1536: 512, 12288: 512, 14336: 512, 48: 16}
    assert {size: block_of(GatedMLPSpec(size)) for size in sizes} == sizes
    with pytest.raises(ValueError, match="an MLP with 40 channels can't be cut into blocks of 16"):
        block_of(GatedMLPSpec(40))
    with pytest.raises(ValueError, match="mixes what its down projections read already"):
        block_of(GatedMLPSpec(128, hadamard=64))
    assert block_of(ExpertsSpec(1408, shared_size=5632)) == 128
    with pytest.raises(ValueError, match="an MLP with 96 and 40 channels can't be cut"):
        block_of(ExpertsSpec(96, shared_size=40))
    layer = LayerSpec(GroupedQuerySpec(), ExpertsSpec(40))
    config = dataclasses.replace(small_config(), layers=(layer,))
    with pytest.raises(ValueError, match="layer 0: an MLP with 40 channels can't be cut"):
        check_blocks(config)

    class Plain(GatedMLPSpec):
        kind = "plain"

        def mixers(self):
            return {}

    with pytest.raises(ValueError, match="an MLP of the kind 'plain' has no place"):
        block_of(Plain(96))
    refused = GatedMLPSpec(96, hadamard=64).why_unsound()
    assert refused == "hadamard is 64: expected a divisor of 96, the channels"
    assert GatedMLPSpec(96, hadamard=32).why_unsound() is None
    assert ExpertsSpec(96, shared_size=64, hadamard=32).why_unsound() is None
    refused = ExpertsSpec(96, shared_size=48, hadamard=32).why_unsound()
    assert refused == "hadamard is 32: expected a divisor of 48, the channels"
    refused = Plain(96, hadamard=32).why_unsound()
    assert refused == "hadamard is set, and the MLP has no place for it"


@pytest.mark.parametrize("count", [2, 4])
def test_shares_have_whole_blocks(count):
    config = small_config(intermediate_size=96)
    mlp = dataclasses.replace(config.layers[0].mlp, hadamard=32)
    layers = tuple(dataclasses.replace(layer, mlp=mlp) for layer in config.layers)
    config = dataclasses.replace(config, layers=layers)
    model = small_model()
    formats = {
        place.path: [WeightFormat("bfloat16")] if place.is_table else [None]
        for place in linear_places(config, NAMES)
    }
    local = Division.of(type(model), config, count, formats).local.layers[0].mlp
    assert local == GatedMLPSpec({2: 64, 4: 32}[count], hadamard=32)


def test_activations_of_16_bits_are_warned_of(tiny, monkeypatch):
    """Where one down projection at least reads rounded activations, nothing is said."""
    monkeypatch.setattr("mpjax.quantization.api.quantize_decoder", lambda *arguments: None)
    message = "hadamard, which is for down projections with activations of 4 or 8 bits, and here"
    with pytest.warns(UserWarning, match=message) as found:
        mpjax.quantize(tiny, Recipe.of("W4g32A16KV8", "rotate+hadamard+rtn"))
    assert found[0].filename == __file__
    rules = [{"modules": "layers.1.mlp.down", "precision": "W8A8KV8"}]
    content = {"precision": "W4g32A16KV8", "method": "hadamard+rtn", "rules": rules}
    mpjax.quantize(tiny, Recipe.parse(content))


def leaves_of(lm):
    return jax.tree.leaves(nnx.state(lm.model))


def test_a_model_is_saved_told_and_not_exported(tiny_folder, tiny, tmp_path, monkeypatch):
    """Of an interrupted run, the layers that are done are taken as they are."""
    recipe = Recipe.of("W8A8KV16", "hadamard+rtn")
    found = mpjax.quantize(tiny, recipe)
    real = FinishedLayers.save

    def save(self, model, number):
        real(self, model, number)
        if number == 0:
            raise KeyboardInterrupt

    options = {"work": tmp_path / "work", "dtype": "float32"}
    with monkeypatch.context() as patch:
        patch.setattr(FinishedLayers, "save", save)
        with pytest.raises(KeyboardInterrupt):
            mpjax.quantize(tiny_folder, recipe, **options)
    resumed = mpjax.quantize(tiny_folder, recipe, **options)
    mpjax.save(resumed, tmp_path / "saved")
    restored = mpjax.load(tmp_path / "saved")
    tokens = jnp.arange(8)[None]
    for lm in (resumed, restored):
        assert all(map(np.array_equal, leaves_of(lm), leaves_of(found)))
        assert lm.config.layers == found.config.layers
        np.testing.assert_array_equal(lm.model(tokens), found.model(tokens))
    block = found.summary()["hadamard_block"]
    assert ("before down", f"Hadamard's transform of blocks of {block} channels") in (
        restored.describe()
    )
    assert tiny.summary()["hadamard_block"] is None
    with pytest.raises(ValueError, match="before its down projections can't be exported"):
        mpjax.export(found, tmp_path / "exported")
