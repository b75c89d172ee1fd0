from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedTensor
from mpjax.quantization.blocks import BlockRule
from mpjax.quantization.folds import linear_of
from mpjax.quantization.pipeline import Stream, quantize_decoder, quantize_layer, reorder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows
from tests.models.small import CONFIG, small_config, small_model

PATHS = CONFIG.layers[0].linear_paths(CONFIG)


def layers_of(model):
    """A function that returns each layer of a model, none of them quantised."""
    return lambda number: (model.layers[number], False)


@pytest.fixture
def batches(rng):
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 4, 32)).astype(np.int32)
    is_real = np.ones((2, 4, 32), bool)
    is_real[1, 3, 5:] = False
    return [Windows(*pair) for pair in zip(tokens, is_real, strict=True)]


def rules_of(recipe, number=0):
    return {path: recipe.rule_of(f"layers.{number}.{path}") for path in PATHS}


def test_statistics_are_of_what_each_map_reads(batches):
    model = small_model(CONFIG)
    stream = Stream.of(model, batches)
    found = stream.statistics(model.layers[0])
    assert found.keys() == set(PATHS)
    assert {float(statistics.tokens) for statistics in found.values()} == {256 - 27}
    hidden = jnp.asarray(stream.states[0])
    normed = model.layers[0].attention_norm(hidden)
    first = np.asarray(normed.reshape(-1, normed.shape[-1]), np.float64)
    alone = Stream.of(model, batches[:1]).statistics(model.layers[0])["attention.qkv"]
    np.testing.assert_allclose(alone.products, first.T @ first, rtol=1e-4, atol=1e-3)


def test_the_stream_goes_on_as_the_model_does(batches):
    model = small_model(CONFIG)
    stream = Stream.of(model, batches)
    for layer in model.layers:
        stream.advance(layer)
    head = (model.embedding if model.head is None else model.head).get_value()
    logits = model.norm(jnp.asarray(stream.states[0])) @ head.T
    np.testing.assert_allclose(logits, model(batches[0].tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["os+gptq"])
def test_a_layer_is_quantised_and_the_plain_one_stays(batches, method):
    model = small_model(CONFIG)
    plain = model.layers[0]
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(plain))]
    stream = Stream.of(model, batches)
    recipe = Recipe.of("W8g64A16KV16", method)
    found = stream.statistics(plain)
    layer = quantize_layer(plain, found, rules_of(recipe), CONFIG.layers[0].folds(CONFIG))
    for leaves in zip(before, jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_array_equal(*leaves)
    kernels = [layer.attention.qkv.parts[0], layer.attention.output, layer.mlp.gate_up.parts[0]]
    kernels.append(layer.mlp.down)
    assert all(isinstance(linear.kernel.get_value(), QuantizedTensor) for linear in kernels)
    hidden = jnp.asarray(stream.states[0])
    expected, _ = plain.inputs(hidden, stream.angles)
    outputs, _ = layer.inputs(hidden, stream.angles)
    error = np.abs(outputs - expected).mean() / np.abs(expected - hidden).mean()
    assert 0 < error < 0.02


def test_maps_of_16_bits_stay(batches):
    model = small_model(CONFIG)
    quantized = nnx.clone(model)
    content = {"precision": "W4g32A16KV16", "method": "rtn"}
    rules = [{"modules": "layers.1.*", "precision": "W16A16KV16"}]
    done = []
    quantize_decoder(
        quantized,
        layers_of(model),
        [],
        Recipe.parse(content | {"rules": rules}),
        lambda number, layer: done.append(number),
    )
    assert done == [0, 1]
    kinds = [type(layer.mlp.down.kernel.get_value()) for layer in quantized.layers]
    assert kinds[0] is QuantizedTensor
    assert issubclass(kinds[1], jax.Array)


def test_too_little_text_for_gptq_is_said(batches):
    model = small_model(CONFIG)
    [few] = [Windows(batches[0].tokens[:1], batches[0].is_real[:1])]
    stream = Stream.of(model, [few])
    found = stream.statistics(model.layers[0])
    rules = rules_of(Recipe.of("W4g32A16KV16", "gptq"))
    places = CONFIG.layers[0].folds(CONFIG)
    with pytest.warns(UserWarning, match="the text has 32 tokens: GPTQ") as said:
        layer = quantize_layer(model.layers[0], dict(found), rules, places)
    assert [str(warning.message).split()[0] for warning in said] == list(PATHS)
    ranges = quantize_layer(
        model.layers[0], found, rules_of(Recipe.of("W4g32A16KV16", "range")), places
    )
    for leaves in zip(*(jax.tree.leaves(nnx.state(x)) for x in (layer, ranges)), strict=True):
        np.testing.assert_array_equal(*leaves)


def test_infinite_states_are_refused_with_the_layer(batches):
    model = small_model(CONFIG)
    weight = model.layers[0].mlp_norm.weight
    weight.set_value(weight.get_value() * jnp.inf)
    with pytest.raises(ValueError, match="layer 0: the hidden states are NaN or infinite"):
        quantize_decoder(model, layers_of(model), batches, Recipe.of("W8g64A16KV16", "rtn"))


def test_weights_beyond_the_range_are_refused_with_their_place():
    model = small_model(CONFIG)
    kernel = model.layers[1].mlp.down.kernel
    kernel.set_value(kernel.get_value() * 1e8)
    with pytest.raises(ValueError, match=r"layer 1: mlp\.down: .* too large for uint4"):
        quantize_decoder(model, layers_of(model), [], Recipe.of("W4g32A16KV16", "rtn"))


WIDE = small_config((None,), hidden_size=256, head_dim=64, intermediate_size=384)


@pytest.fixture(scope="module")
def mixed():
    """A plain layer with outliers, its statistics, and hidden states that it reads."""
    rng = np.random.default_rng(1)
    model = small_model(WIDE)
    norm = model.layers[0].attention_norm.weight
    outliers = np.ones(256, np.float32)
    outliers[[5, 200]] = 30
    norm.set_value(norm.get_value() * outliers)
    tokens = rng.integers(0, WIDE.vocab_size, (2, 32)).astype(np.int32)
    stream = Stream.of(model, [Windows(tokens, np.ones((2, 32), bool))])
    return model.layers[0], stream.statistics(model.layers[0]), stream


def mixed_layer(mixed, blocks):
    layer, found, _ = mixed
    return quantize_layer(layer, dict(found), rules_for(blocks), WIDE.layers[0].folds(WIDE))


def rules_for(blocks):
    rule = dataclasses.replace(Recipe.of("W4AxKV16", "rtn").rules[0], blocks=blocks)
    return dict.fromkeys(PATHS, rule)


def kernels_of(layer):
    return {path: linear_of(layer, path).kernel.get_value() for path in PATHS}


def test_blocks_are_chosen_and_channels_sorted(mixed):
    kernels = kernels_of(mixed_layer(mixed, BlockRule(8)))
    widths = {path: kernel.activation_bits.tolist() for path, kernel in kernels.items()}
    assert widths["attention.qkv"] == [8, 4]  # the outliers' block
    assert sum(bits == 8 for each in widths.values() for bits in each) == 1  # one of nine, rounded
    order = np.asarray(kernels["attention.qkv"].permutation)
    assert set(order[:2]) == {5, 200}
    moves = {path: kernel.permutation is not None for path, kernel in kernels.items()}
    assert moves == {path: path != "mlp.down" for path in PATHS}


def test_channels_that_move_change_no_output(mixed):
    """In float32, with the weights that the packed layer stands for."""
    layer, found, stream = mixed
    hidden = jnp.asarray(stream.states[0])
    expected, _ = layer.inputs(hidden, stream.angles)
    moved = nnx.clone(layer)
    orders = reorder(moved, dict(found), rules_for(BlockRule()), WIDE.layers[0].folds(WIDE))
    assert orders.keys() == set(PATHS) - {"mlp.down"}
    outputs, inputs = moved.inputs(hidden, stream.angles)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    # The maps that are left move their rows and their inputs.
    for path, order in orders.items():
        kernel = linear_of(layer, path).kernel.get_value()
        products = inputs[path] @ kernel, inputs[path][..., order] @ kernel[order]
        np.testing.assert_allclose(*products, rtol=1e-4, atol=1e-3)
