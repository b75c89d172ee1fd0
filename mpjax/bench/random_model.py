"""Models with random weights in a published shape and any precision, to measure speed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.checkpoint.layout import array_places, assign_array, assign_linear, linear_places
from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Decoder, DecoderConfig, Linear


def random_model(
    decoder: type[Decoder], config: DecoderConfig, format: WeightFormat | None, seed: int = 0
) -> Decoder:
    """Makes a decoder on the device, with normal weights quantised to `format`.

    Norms are ones and biases zeros. Without a format, linear maps have the model's dtype, like all
    other weights.
    """
    model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
    dtype = jnp.dtype(config.dtype)
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * config.num_layers))
    for array in array_places(config):
        if len(array.shape) == 1:
            assign_array(model, array, jnp.ones(array.shape, dtype))
        else:
            assign_array(model, array, _normal(next(keys), array.shape, 0.02, dtype.name))
    for place in linear_places(config):
        channels, outputs = place.shapes[0][0], sum(shape[1] for shape in place.shapes)
        kernel = _kernel(next(keys), (channels, outputs), format, dtype.name)
        bias = jnp.zeros(outputs, dtype) if place.bias else None
        assign_linear(model, place, [Linear(kernel, bias)])
    return model


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float, dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _kernel(
    key: jax.Array, shape: tuple[int, int], format: WeightFormat | None, dtype: str
) -> QuantizedTensor | jax.Array:
    # With this deviation the outputs of a map are as large as its inputs.
    kernel = _normal(key, shape, shape[0] ** -0.5, dtype)
    return kernel if format is None or not format.is_packed else quantize(kernel, format)
