from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import DecoderLayer
from mpjax.models.parameters import find
from mpjax.quantization import folds
from tests.models.small import CONFIG, small_config, small_mixture


def make_layer(config):
    return DecoderLayer(config, config.layers[0], nnx.Rngs(0))


@pytest.mark.parametrize(
    ("norms", "is_offset", "changes"),
    [
        ("pre", False, {}),
        ("post", False, {"qk_norm": True, "joint_norm": True}),  # as OLMo 2
        ("both", True, {"qk_norm": True}),  # as Gemma 3
    ],
)
def test_a_layer_computes_what_it_computed(norms, is_offset, changes, rng):
    [spec, _] = CONFIG.layers
    attention = dataclasses.replace(spec.attention, **changes)
    spec = dataclasses.replace(spec, attention=attention, norms=norms)
    layer = make_layer(dataclasses.replace(CONFIG, layers=(spec,), offset_norms=is_offset))
    hidden = jnp.asarray(rng.standard_normal((2, 9, CONFIG.hidden_size)), jnp.float32)
    angles = jnp.asarray(rng.uniform(0, 3, (2, 9, CONFIG.head_dim // 2)), jnp.float32)
    expected, inputs = layer.inputs(hidden, {"global": angles})
    readers = {"attention.qkv", "mlp.gate_up"} if norms == "post" else set()
    assert {fold.target for fold in spec.folds(CONFIG)} == {*spec.linear_paths(CONFIG)} - readers
    for fold in spec.folds(CONFIG):
        rows = inputs[fold.target].shape[-1]
        scales = folds.tie(fold, jnp.asarray(rng.uniform(0.3, 3, rows), jnp.float32))
        before = folds.linear_of(layer, fold.target).kernel.get_value()
        folds.apply(layer, fold, scales)
        after = folds.linear_of(layer, fold.target).kernel.get_value()
        np.testing.assert_allclose(after, before * scales[:, None], rtol=1e-6)
        found, read = layer.inputs(hidden, {"global": angles})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            read[fold.target] * scales[None, None], inputs[fold.target], rtol=1e-4, atol=1e-6
        )
        inputs = read


def values_of(layer, path):
    """The kernel of a linear map, or an array."""
    node = find(layer, path)
    return (
        node if isinstance(node, nnx.Param) else folds.linear_of(layer, path).kernel
    ).get_value()


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_computes_what_it_computed(shared, rng):
    """In particular, tokens go to the experts that they went to."""
    model = small_mixture(shared)
    [layer], [spec] = model.layers, model.config.layers
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 9)))
    expected = model(tokens)
    places = spec.folds(model.config)
    assert {fold.target for fold in places} >= set(spec.linear_paths(model.config)) - {
        "mlp.shared.gate_up"  # which has the scales of experts
    }
    for fold in places:
        shape = folds.linear_of(layer, fold.target).kernel.get_value().shape
        shape = shape[:2] if folds.is_of_experts(layer, fold) else shape[-2:-1]
        scales = folds.tie(fold, jnp.asarray(rng.uniform(0.3, 3, shape), jnp.float32))
        before = nnx.clone(layer)
        folds.apply(layer, fold, scales)
        for path in fold.readers:
            assert not np.array_equal(*(values_of(each, path) for each in (before, layer)))
        np.testing.assert_allclose(model(tokens), expected, rtol=1e-3, atol=1e-3)


def test_channels_of_experts_may_come_in_another_order(rng):
    """With biases; each expert has an order of its own."""
    model = small_mixture(shared=True)
    [layer], [spec] = model.layers, model.config.layers
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 9)))
    expected = model(tokens)
    moved = [fold for fold in spec.folds(model.config) if fold.is_elementwise]
    assert [fold.target for fold in moved] == ["mlp.experts.down", "mlp.shared.down"]
    for fold in moved:
        rows = folds.linear_of(layer, fold.target).kernel
        before, *leading = rows.get_value(), *rows.get_value().shape[:-1]
        order = jnp.asarray(rng.permuted(np.indices(leading)[-1], axis=-1))
        folds.permute(layer, fold, order)
        assert not np.array_equal(before, rows.get_value())
        np.testing.assert_allclose(model(tokens), expected, rtol=1e-3, atol=1e-3)


def test_channels_may_move_within_heads(rng):
    """Those of values, with biases, and alike in all query heads that read them."""
    config = small_config((None,), qkv_bias=True)
    layer, spec = make_layer(config), config.layers[0]
    for parameter in (layer.attention.qkv.parts[0].bias,):
        parameter.set_value(jnp.asarray(rng.standard_normal(parameter.shape), jnp.float32))
    hidden = jnp.asarray(rng.standard_normal((2, 9, config.hidden_size)), jnp.float32)
    angles = jnp.asarray(rng.uniform(0, 3, (2, 9, config.head_dim // 2)), jnp.float32)
    expected, inputs = layer.inputs(hidden, {"global": angles})
    [fold] = [fold for fold in spec.folds(config) if fold.target == "attention.output"]
    heads, copies, channels = fold.repeats
    own = rng.permuted(np.tile(np.arange(channels), (heads, 1, 1)), axis=-1)
    firsts = np.arange(heads * copies).reshape(heads, copies, 1) * channels
    order = jnp.asarray((firsts + own).reshape(-1))
    folds.permute(layer, fold, order)
    found, moved = layer.inputs(hidden, {"global": angles})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        moved["attention.output"], inputs["attention.output"][..., order], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("number", [1, 3])
def test_biases_are_divided_too(number):
    config = small_config((None,), qkv_bias=True, mlp_bias=True)
    layer = make_layer(config)
    fold = config.layers[0].folds(config)[number]
    bias = folds.linear_of(layer, fold.source).bias
    bias.set_value(jnp.ones_like(bias.get_value()))
    rows = folds.linear_of(layer, fold.target).kernel.get_value().shape[0]
    folds.apply(layer, fold, jnp.full(rows, 2.0))
    last = folds.find(layer, fold.source).sizes[-1]  # values are the last, and so is up
    np.testing.assert_array_equal(bias.get_value()[-last:], 0.5)
    np.testing.assert_array_equal(bias.get_value()[:-last], 1)
