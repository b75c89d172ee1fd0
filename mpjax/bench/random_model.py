"""Models with random weights in a published shape and any precision, to measure speed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import QuantizedTensor, WeightFormat, quantize
from mpjax.models import Decoder, DecoderConfig, Linear


def random_model(
    decoder: type[Decoder], config: DecoderConfig, format: WeightFormat | None, seed: int = 0
) -> Decoder:
    """Makes a decoder on the device, with normal weights quantised to `format`.

    Norms are ones and biases zeros. Without a format, linear maps have the model's dtype, like all
    other weights. With W4Ax, input channels have a random order where a calibrated model's have one
    that is not folded into other weights, and one block of 8 has 8 bits.
    """
    model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
    dtype = jnp.dtype(config.dtype)
    places = decoder.linear_places(config)
    folded = {
        f"layers.{number}.{fold.target}"
        for number, spec in enumerate(config.layers)
        for fold in spec.folds(config)
        if fold.is_elementwise
    }
    keys = iter(jax.random.split(jax.random.key(seed), 2 + len(places)))
    for array in decoder.array_places(config):
        if len(array.shape) == 1:
            array.assign(model, jnp.ones(array.shape, dtype))
        else:
            array.assign(model, _normal(next(keys), array.shape, 0.02, dtype.name))
    for place in places:
        [shape] = place.part_shapes(1)
        kernel = _kernel(next(keys), shape, format, dtype.name)
        if format is not None and format.codes == "int4" and len(shape) == 2:
            kernel = _with_blocks(kernel, ordered=place.path not in folded)
        bias = jnp.zeros((*shape[:-2], shape[-1]), dtype) if place.bias else None
        place.assign(model, [Linear(kernel, bias)])
    return model


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


def _with_blocks(kernel: Any, *, ordered: bool) -> QuantizedTensor:
    channels = kernel.shape[0]
    order = jax.random.permutation(jax.random.key(1), channels).astype(jnp.int32)
    widths = jnp.where(jnp.arange(kernel.parameters.shape[-2]) % 8 == 0, jnp.uint8(8), jnp.uint8(4))
    return dataclasses.replace(
        kernel,
        permutation=order if ordered else None,
        activation_bits=widths,
    )
