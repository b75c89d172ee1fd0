"""Models with random weights in published shapes and any precision, to measure speed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Decoder, DecoderConfig, ExpertPlace, Linear, LinearPlace
from mpjax.models.division import Division
from mpjax.models.eagle import EagleSpec, tokens_place
from mpjax.models.presets import published
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.share import ExpertDivision
from mpjax.quantization.blocks import is_folded


def published_layers(name: str, layers: int | None) -> tuple[type[Decoder], DecoderConfig]:
    """The class and the config of a published model, or of its first layers.

    Raises ValueError for an unknown name, and for more layers than the model has.
    """
    decoder, config = published(name)
    if layers is not None and layers > config.num_layers:
        raise ValueError(f"layers is {layers}, and {name} has {config.num_layers}")
    return decoder, dataclasses.replace(config, layers=config.layers[:layers])


def random_model(
    decoder: type[Decoder],
    config: DecoderConfig,
    format: WeightFormat | None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    experts: ExpertDivision = "divided",
) -> Decoder:
    """A decoder on the device, with normally distributed weights quantised to `format`.

    Norms are ones and biases zeros. Without a format, linear maps have the model's dtype. mesh: the
    devices among which the decoder is divided; the weights don't depend on their number. experts:
    how experts are divided; see `mpjax.load`. With W4Ax, input channels are permuted at random
    wherever a calibrated model's permutation can't be folded into other weights, and one in 8
    blocks has 8 bits.
    """
    model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
    if mesh is not None:
        packed = format if format is not None and format.is_packed else None
        formats = {place.path: [packed] for place in decoder.linear_places(config)}
        division = Division.of(decoder, config, mesh.size, formats, experts)
        model = ShardedDecoder.of(division, mesh)
    dtype = jnp.dtype(config.dtype)
    places = decoder.linear_places(config)
    folded = {
        f"layers.{number}.{fold.target}"
        for number, spec in enumerate(config.layers)
        for fold in spec.folds(config)
        if is_folded(fold)
    }
    arrays = decoder.array_places(config)
    count = len(places) + sum(len(array.shape) > 1 for array in arrays)
    keys = iter(jax.random.split(jax.random.key(seed), count))
    for array in arrays:
        if len(array.shape) == 1:
            model.put_array(array, jnp.ones(array.shape, dtype))
        else:
            model.put_array(array, normal(next(keys), array.shape, 0.02, dtype.name))
    if isinstance(head := config.layers[-1].attention, EagleSpec):
        model.put_array(tokens_place(config), jnp.arange(head.vocabulary, dtype=jnp.int32))
    for place in places:
        [shape] = place.part_shapes(1)
        kernel = _kernel(next(keys), shape, _format_of(place, format), dtype.name)
        if isinstance(kernel, QuantizedTensor) and kernel.format.codes == "int4":
            kernel = _with_blocks(kernel, ordered=place.path not in folded)
        bias = jnp.zeros((*shape[:-2], shape[-1]), dtype) if place.bias else None
        model.put_linears(place, [Linear(kernel, bias)])
    return model


def _format_of(place: LinearPlace, format: WeightFormat | None) -> WeightFormat | None:
    """The format of a linear map: MXFP4 applies to experts alone, as in gpt-oss."""
    is_dense = not isinstance(place, ExpertPlace)
    return None if format is not None and format.codes == "float4" and is_dense else format


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple[int, ...], deviation: float, dtype: str) -> jax.Array:
    """Normally distributed numbers of a shape and dtype, made on the device in one program."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _kernel(
    key: jax.Array, shape: tuple[int, ...], format: WeightFormat | None, dtype: str
) -> QuantizedTensor | jax.Array:
    # With this deviation, a linear map's outputs are as large as its inputs.
    kernel = normal(key, shape, shape[-2] ** -0.5, dtype)
    return kernel if format is None or not format.is_packed else quantize(kernel, format)


def _with_blocks(kernel: Any, *, ordered: bool) -> QuantizedTensor:
    *experts, channels, _ = kernel.shape
    order = jax.random.permutation(jax.random.key(1), channels).astype(jnp.int32)
    order = jnp.broadcast_to(order, (*experts, channels))
    groups = kernel.parameters.shape[:-1]
    widths = jnp.where(jnp.arange(groups[-1]) % 8 == 0, jnp.uint8(8), jnp.uint8(4))
    widths = jnp.broadcast_to(widths, groups)
    return dataclasses.replace(
        kernel,
        permutation=order if ordered else None,
        activation_bits=widths,
    )
