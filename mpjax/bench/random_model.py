"""Models with random weights in a published shape and any precision, to measure speed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Decoder, DecoderConfig, ExpertPlace, Linear, LinearPlace


def random_model(
    decoder: type[Decoder], config: DecoderConfig, format: WeightFormat | None, seed: int = 0
) -> Decoder:
    """Makes a decoder on the device, with normal weights quantised to `format`.

    Norms are ones and biases zeros. Without a format, linear maps have the model's dtype, like all
    other weights.
    """
    model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
    dtype = jnp.dtype(config.dtype)
    places = decoder.linear_places(config)
    arrays = decoder.array_places(config)
    count = len(places) + sum(len(array.shape) > 1 for array in arrays)
    keys = iter(jax.random.split(jax.random.key(seed), count))
    for array in arrays:
        if len(array.shape) == 1:
            array.assign(model, jnp.ones(array.shape, dtype))
        else:
            array.assign(model, _normal(next(keys), array.shape, 0.02, dtype.name))
    for place in places:
        [shape] = place.part_shapes(1)
        kernel = _kernel(next(keys), shape, _format_of(place, format), dtype.name)
        bias = jnp.zeros((*shape[:-2], shape[-1]), dtype) if place.bias else None
        place.assign(model, [Linear(kernel, bias)])
    return model


def _format_of(place: LinearPlace, format: WeightFormat | None) -> WeightFormat | None:
    """The format of a place: MXFP4 is that of experts alone, as gpt-oss is published."""
    is_dense = not isinstance(place, ExpertPlace)
    return None if format is not None and format.codes == "float4" and is_dense else format


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float, dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _kernel(
    key: jax.Array, shape: tuple[int, ...], format: WeightFormat | None, dtype: str
) -> QuantizedTensor | jax.Array:
    # With this deviation the outputs of a map are as large as its inputs.
    kernel = _normal(key, shape, shape[-2] ** -0.5, dtype)
    return kernel if format is None or not format.is_packed else quantize(kernel, format)
