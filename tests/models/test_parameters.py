from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.models import (
    Decoder,
    ExpertPlace,
    ExpertsSpec,
    GroupedQuerySpec,
    LayerSpec,
    Linear,
    LinearPlace,
    family,
)
from mpjax.models.parameters import (
    NAMES,
    Names,
    array_places,
    find,
    linear_places,
    name_of,
    names_of,
)
from tests.models.small import CONFIG, small_config, small_model
from tests.mpjax.checkpoint.write_checkpoint import CONFIGS, linear_shapes, random_tensors


def abstract_model(hf):
    decoder = family(hf)
    config = decoder.config_from_hf(hf)
    return nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_places_cover_the_file_and_the_module(name, rng):
    hf = CONFIGS[name]
    model, tensors = abstract_model(hf), random_tensors(hf, rng)
    covered = {place.name: place.shape for place in model.array_places(model.config)}
    for place in model.linear_places(model.config):
        for module, (channels, outputs) in zip(place.names, place.shapes, strict=True):
            assert linear_shapes(hf)[module] == (channels, outputs)
            covered[f"{module}.weight"] = (outputs, channels)
            covered |= {f"{module}.bias": (outputs,)} if place.bias else {}
    assert covered == {tensor: array.shape for tensor, array in tensors.items()}

    for array in model.array_places(model.config):
        assert array.read(model).shape == array.shape
        array.assign(model, jnp.zeros(array.shape, model.config.dtype))
    for place in model.linear_places(model.config):
        [part], [kernel] = place.parts(model), place.kernels(model)
        assert kernel.shape == (place.shapes[0][0], sum(outputs for _, outputs in place.shapes))
        assert place.part_shapes(1) == [kernel.shape]
        assert place.part_shapes(len(place.names)) == list(place.shapes)
        assert (part.bias is not None) == place.bias
        parts = [
            Linear(
                jnp.zeros(shape, model.config.dtype),
                jnp.zeros(shape[1], model.config.dtype) if place.bias else None,
            )
            for shape in place.shapes
        ]
        place.assign(model, parts)
        assert place.parts(model) == parts
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    logits = jax.eval_shape(lambda tokens: model(tokens), jnp.zeros((1, 3), jnp.int32))
    assert logits.shape == (1, 3, hf["vocab_size"])


def test_find():
    model = abstract_model(CONFIGS["llama"])
    assert find(model, "layers.1.attention.output") is model.layers[1].attention.output
    assert find(model, "norm") is model.norm


def test_names_are_those_of_the_family():
    names = NAMES | {"mlp.down": "h.{layer}.out", "norm.weight": "final"}
    assert array_places(CONFIG, names)[-2].name == "final"
    assert [place.names for place in linear_places(CONFIG, names)][3::4] == [
        ("h.0.out",),
        ("h.1.out",),
    ]
    assert name_of(NAMES, "embedding") == "model.embed_tokens.weight"
    assert names_of(NAMES, "mlp.gate_up", 3)[1] == "model.layers.3.mlp.up_proj"


def test_a_family_names_all_of_its_parameters():
    class Nameless(Decoder):
        names: ClassVar[Names] = {path: NAMES[path] for path in NAMES if path != "mlp.down"}

    with pytest.raises(ValueError, match=r"^the family's names have no 'mlp.down': add the"):
        Nameless.linear_places(CONFIG)


def test_a_number_of_parts_that_maps_can_not_have():
    place = LinearPlace("mlp.three", ("a", "b", "c"), ((8, 4), (8, 2), (8, 2)), False)
    assert place.part_shapes(1) == [(8, 8)]
    with pytest.raises(ValueError, match=r"^mlp\.three has 2 parts: expected 1 or 3$"):
        place.part_shapes(2)


def test_maps_have_one_linear_for_each_name():
    model = small_model(small_config(qkv_bias=True))
    for place in model.linear_places(model.config):
        maps = place.maps(model)
        assert [each.kernel.get_value().shape for each in maps] == [*place.shapes]
        assert [each.bias is not None for each in maps] == [place.bias] * len(place.names)
        [joint], [again] = place.parts(model), place.join(maps)
        assert jnp.array_equal(joint.kernel.get_value(), again.kernel.get_value())
        place.assign(model, maps)  # which a fused map may hold apart, too
        assert [each is one for each, one in zip(place.maps(model), maps, strict=True)]


def test_the_maps_of_experts_are_a_stack():
    layers = (LayerSpec(GroupedQuerySpec(), ExpertsSpec(32, num_experts=3, bias=True)),)
    config = dataclasses.replace(CONFIG, layers=layers)
    names = NAMES | {
        "mlp.router": "r",
        "mlp.experts.gate_up": ("{layer}.{expert}.g", "{layer}.{expert}.u"),
        "mlp.experts.down": "{layer}.{expert}.d",
    }
    *_, place, down = linear_places(config, names)
    assert isinstance(place, ExpertPlace)
    assert place.names == ("0.0.g", "0.0.u", "0.1.g", "0.1.u", "0.2.g", "0.2.u")
    assert place.shapes == ((64, 32),) * 6
    assert (place.joined_maps, down.joined_maps) == (2, 1)
    assert place.part_shapes(1) == [(3, 64, 64)]
    one = 2 * 64 * 64  # bytes of an expert in 16 bits
    for room, size in ((0, 1), (2 * one - 1, 1), (2 * one, 2), (100 * one, 3)):
        ends = [min(begin + size, 3) for begin in range(0, 3, size)]
        pieces = place.pieces(room)
        assert [window.end for window in pieces] == ends
        assert [place.within([window]).experts for window in pieces] == [w.length for w in pieces]
    with pytest.raises(
        ValueError, match=r"^layers\.0\.mlp\.experts\.gate_up has 2 parts: expected 1"
    ):
        place.part_shapes(2)
    model = Decoder(config, nnx.Rngs(0))
    maps = place.maps(model)
    assert [each.kernel.get_value().shape for each in maps] == [*place.shapes]
    [joint], [again] = place.parts(model), place.join(iter(maps))
    assert jnp.array_equal(joint.kernel.get_value(), again.kernel.get_value())
    place.assign(model, [again])
    assert place.parts(model) == [again]
