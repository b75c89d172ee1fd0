from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.checkpoint.layout import (
    array_places,
    assign_array,
    assign_linear,
    find,
    linear_kernels,
    linear_parts,
    linear_places,
)
from mpjax.models import Linear, family
from tests.mpjax.checkpoint.write_checkpoint import CONFIGS, linear_shapes, random_tensors


def abstract_model(hf):
    decoder = family(hf)
    config = decoder.config_from_hf(hf)
    return nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_places_cover_the_file_and_the_module(name, rng):
    hf = CONFIGS[name]
    model, tensors = abstract_model(hf), random_tensors(hf, rng)
    covered = {place.name: place.shape for place in array_places(model.config)}
    for place in linear_places(model.config):
        for module, (channels, outputs) in zip(place.names, place.shapes, strict=True):
            assert linear_shapes(hf)[module] == (channels, outputs)
            covered[f"{module}.weight"] = (outputs, channels)
            covered |= {f"{module}.bias": (outputs,)} if place.bias else {}
    assert covered == {tensor: array.shape for tensor, array in tensors.items()}

    for array in array_places(model.config):
        assert find(model, array.path).get_value().shape == array.shape
        assign_array(model, array, jnp.zeros(array.shape, model.config.dtype))
    for place in linear_places(model.config):
        [part], [kernel] = linear_parts(model, place), linear_kernels(model, place)
        assert kernel.shape == (place.shapes[0][0], sum(outputs for _, outputs in place.shapes))
        assert (part.bias is not None) == place.bias
        parts = [
            Linear(
                jnp.zeros(shape, model.config.dtype),
                jnp.zeros(shape[1], model.config.dtype) if place.bias else None,
            )
            for shape in place.shapes
        ]
        assign_linear(model, place, parts)
        assert linear_parts(model, place) == parts
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    logits = jax.eval_shape(lambda tokens: model(tokens), jnp.zeros((1, 3), jnp.int32))
    assert logits.shape == (1, 3, hf["vocab_size"])


def test_find():
    model = abstract_model(CONFIGS["llama"])
    assert find(model, "layers.1.attention.output") is model.layers[1].attention.output
    assert find(model, "norm") is model.norm
