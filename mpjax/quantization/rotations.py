"""Rotations of the residual stream and of values, folded into the weights (QuaRot's R1 and R2).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024), §4. An RMS norm
without a weight commutes with a rotation Q. So the weights of norms move into the linear maps
behind them, every map into the stream is multiplied by Q, and every map out of it by its inverse.
The model computes what it computed, and no channel of the stream is much larger than the others. A
rotation of each head's values is undone by the output map, in the same way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models import DecoderConfig
from mpjax.models.decoder import DecoderLayer
from mpjax.quantization.folds import linear_of

PRECISION = jax.lax.Precision.HIGHEST


def rotation(size: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix float64 [size, size] that mixes all channels alike.

    The Kronecker product of Hadamard's matrix of the largest power of two that divides the size,
    and a random orthogonal matrix, with random signs of the rows.
    """
    power = size & -size
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rng = np.random.default_rng(seed)
    orthogonal, triangular = np.linalg.qr(rng.standard_normal((size // power, size // power)))
    orthogonal = orthogonal * np.sign(np.diag(triangular))
    signs = rng.choice([-1.0, 1.0], size)
    return signs[:, None] * np.kron(hadamard / np.sqrt(power), orthogonal)


def rotate_layer(
    layer: DecoderLayer, stream: jax.Array, values: jax.Array, config: DecoderConfig
) -> None:
    """Rotates the residual stream and the values of a layer with plain kernels, in place.

    stream: float32 [hidden size, hidden size]. values: float32 [head dim, head dim].
    """
    for norm, path in ((layer.attention_norm, "attention.qkv"), (layer.mlp_norm, "mlp.gate_up")):
        kernel = linear_of(layer, path).kernel
        weight = kernel.get_value()
        rows = norm.weight.get_value().astype(jnp.float32)[:, None] * weight.astype(jnp.float32)
        kernel.set_value(_product(stream.T, rows).astype(weight.dtype))
        norm.weight.set_value(jnp.ones_like(norm.weight.get_value()))
    _rotate_values(layer, values, config)
    for path in ("attention.output", "mlp.down"):
        linear = linear_of(layer, path)
        for parameter in filter(None, (linear.kernel, linear.bias)):
            array = parameter.get_value()
            parameter.set_value(_product(array.astype(jnp.float32), stream).astype(array.dtype))


def _rotate_values(layer: DecoderLayer, values: jax.Array, config: DecoderConfig) -> None:
    heads, dim = config.num_kv_heads, config.head_dim
    qkv, output = linear_of(layer, "attention.qkv"), linear_of(layer, "attention.output")
    for parameter in filter(None, (qkv.kernel, qkv.bias)):
        array = parameter.get_value()
        last = array[..., -heads * dim :].astype(jnp.float32)
        turned = _product(last.reshape(*last.shape[:-1], heads, dim), values)
        turned = turned.reshape(last.shape).astype(array.dtype)
        parameter.set_value(jnp.concatenate([array[..., : -heads * dim], turned], -1))
    weight = output.kernel.get_value()
    rows = weight.astype(jnp.float32).reshape(config.num_heads, dim, -1)
    turned = jnp.einsum("dc,hdn->hcn", values, rows, precision=PRECISION)
    output.kernel.set_value(turned.reshape(weight.shape).astype(weight.dtype))


def rotate_embedding(embedding: jax.Array, stream: jax.Array) -> jax.Array:
    """The embedding [vocabulary, hidden size] of the rotated stream."""
    return _product(embedding.astype(jnp.float32), stream).astype(embedding.dtype)


def rotate_head(head: jax.Array, norm: jax.Array, stream: jax.Array) -> jax.Array:
    """The head [vocabulary, hidden size] of the rotated stream, behind a norm without a weight."""
    rows = head.astype(jnp.float32) * norm.astype(jnp.float32)[None]
    return _product(rows, stream).astype(head.dtype)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=PRECISION)
