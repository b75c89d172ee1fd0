"""Distributes the layers of a model among devices, one by one, as they are quantised."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from mpjax.models import Decoder
from mpjax.models.division import Division
from mpjax.models.sharded import ShardedDecoder
from mpjax.quantization.recipe import Recipe

LAYERS = "layers."  # the prefix of the paths of parameters in layers


def divided_decoder(model: Decoder, recipe: Recipe, mesh: jax.sharding.Mesh) -> ShardedDecoder:
    """An abstract divided decoder for a model that a recipe quantises.

    model: its tables already have their final formats. Raises ValueError if it can't be divided so.
    """
    formats = {}
    for place in model.linear_places(model.config):
        if place.is_table:
            formats[place.path] = [part.format for part in place.parts(model)]
        else:
            wanted = recipe.rule_of(place.path).weights
            formats[place.path] = [wanted if wanted.is_packed else None]
    division = Division.of(type(model), model.config, mesh.size, formats)
    return ShardedDecoder.of(division, mesh)


def move_layer(model: Decoder, number: int, divided: ShardedDecoder) -> None:
    """Gives each device its share of a layer; the model keeps only shapes."""
    prefix = f"{LAYERS}{number}."
    _move(model, divided, lambda path: path.startswith(prefix))
    layer = model.layers[number]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.state(layer))
    nnx.update(layer, shapes)


def move_rest(model: Decoder, divided: ShardedDecoder) -> None:
    """Gives each device its share of the parameters outside layers."""
    _move(model, divided, lambda path: not path.startswith(LAYERS))


def _move(model: Decoder, divided: ShardedDecoder, belongs: Callable[[str], bool]) -> None:
    for place in model.array_places(model.config):
        if belongs(place.path):
            divided.put_array(place, place.read(model))
    for linear_place in model.linear_places(model.config):
        if belongs(linear_place.path):
            divided.put_linears(linear_place, linear_place.parts(model))
