"""Rotations of the residual stream and of values, folded into the weights (QuaRot's R1 and R2).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024), §4. An RMS norm
without a weight commutes with a rotation Q. So the norms' weights are folded into the linear maps
that read them, these maps are multiplied by the inverse of Q, and all outputs that are added to the
stream are multiplied by Q. The model's function doesn't change, and no channel of the stream is
much larger than the others. A rotation of each value head's channels is undone by the output map.

The layer's spec lists which maps read and write the stream, and which channels may be mixed.
QuaRot's other rotations run online: R3 rotates queries and keys after RoPE, as KV4 does with keys,
and R4 the inputs of the down projection (`hadamard`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models import Decoder, DecoderConfig, DecoderLayer, FusedLinear, LayerSpec, Linear
from mpjax.models.config_checks import ROPES
from mpjax.models.maps import Fold
from mpjax.models.parameters import find
from mpjax.quantization.folds import linear_of
from mpjax.quantization.statistics import PRECISION

OF_STREAM, OF_VALUES, OF_CHECK = range(3)  # seeds
GATE = 0.05  # bound of mean error / mean magnitude; bfloat16 weights give about 0.005
CHECKED_TOKENS = 16
NORMS = ("attention_norm", "mlp_norm")


def rotation(size: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix float64 [size, size] that mixes all channels alike.

    The Kronecker product of a Hadamard matrix, of the largest power of two that divides the size,
    and a random orthogonal matrix, with random row signs.
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


@functools.lru_cache(maxsize=1)  # shared by all layers of a model
def stream_rotation(config: DecoderConfig) -> jax.Array:
    """The rotation of a model's residual stream, float32 [hidden size, hidden size]."""
    return jnp.asarray(rotation(config.hidden_size, OF_STREAM), jnp.float32)


def rotate_tables(model: Decoder) -> None:
    """Rotates embedding and head of a model in place, and folds the final norm into the head.

    A tied table is untied, since only the head has the norm. Raises ValueError for packed tables.
    """
    if model.config.packed_tables:
        raise ValueError(f"{model.config.packed_tables[0]} is packed: load it in 16 bits")
    stream = stream_rotation(model.config)
    embedding: Any = model.embedding
    source: Any = embedding if model.config.tie_word_embeddings else model.head
    head = source.get_value()
    norm = model.norm.weight.get_value()
    rows = head.astype(jnp.float32) * norm.astype(jnp.float32)[None]
    model.head = nnx.data(None)
    model.head = nnx.Param(_product(rows, stream).astype(head.dtype))
    model.norm.weight.set_value(jnp.ones_like(norm))
    embedding.set_value(_turned(embedding.get_value(), stream))
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)


def rotate_layer(layer: DecoderLayer, spec: LayerSpec, config: DecoderConfig) -> None:
    """Rotates a 16-bit layer's inputs from and outputs to the residual stream, in place.

    Raises ValueError for a layer whose function this changes: its spec doesn't list all readers and
    writers of the stream, or there is a norm after a sublayer.
    """
    folds = spec.folds(config)
    readers = {fold.source: fold for fold in folds if fold.source in NORMS}
    if missing := [norm for norm in spec.pre_norms.values() if norm not in readers]:
        raise ValueError(
            f"layers of this family can't be rotated, because nothing says all that reads "
            f"{missing[0]}: leave rotate out of the method"
        )
    expected = _outputs(layer, config, is_rotated=False)
    stream = stream_rotation(config)
    for fold in readers.values():
        _rotate_reader(layer, fold, stream)
    for fold in filter(lambda fold: fold.is_mixable, folds):
        _rotate_channels(layer, fold)
    for path in spec.writers(config):
        linear = linear_of(layer, path)
        for parameter in filter(None, (linear.kernel, linear.bias)):
            parameter.set_value(_turned(parameter.get_value(), stream))
    found = _outputs(layer, config, is_rotated=True)
    error = float(jnp.abs(found - expected).mean() / jnp.abs(expected).mean())
    if not error < GATE:
        raise ValueError(
            f"a rotation changes what the layer computes by {error:.0%}: layers of this family "
            "can't be rotated, so leave rotate out of the method"
        )


def _rotate_reader(layer: DecoderLayer, fold: Fold, stream: jax.Array) -> None:
    """Folds a norm's weight into its readers, and rotates their inputs."""
    norm = find(layer, fold.source).weight
    turn = norm.get_value().astype(jnp.float32)[:, None] * stream
    for path in fold.readers:
        node = find(layer, path)
        if isinstance(node, Linear | FusedLinear):
            kernel = linear_of(layer, path).kernel
            weight = kernel.get_value()
            kernel.set_value(_product(turn.T, weight.astype(jnp.float32)).astype(weight.dtype))
        else:  # an array [outputs, channels]
            node.set_value(_turned(node.get_value(), turn))
    norm.set_value(jnp.ones_like(norm.get_value()))


def _rotate_channels(layer: DecoderLayer, fold: Fold) -> None:
    """Rotates the channels of each head of a fold's source, and inversely the target's rows.

    In a fused source, the heads are in the map `fold.part`.
    """
    assert fold.repeats is not None
    heads, copies, channels = fold.repeats
    turn = jnp.asarray(rotation(channels, OF_VALUES), jnp.float32)
    source, linear = find(layer, fold.source), linear_of(layer, fold.source)
    begin = sum(source.sizes[: fold.part]) if isinstance(source, FusedLinear) else 0
    for parameter in filter(None, (linear.kernel, linear.bias)):
        array = parameter.get_value()
        own = array[..., begin : begin + heads * channels]
        turned = _turned(own.reshape(*own.shape[:-1], heads, channels), turn).reshape(own.shape)
        parameter.set_value(array.at[..., begin : begin + heads * channels].set(turned))
    kernel = linear_of(layer, fold.target).kernel
    weight = kernel.get_value()
    rows = weight.astype(jnp.float32).reshape(heads * copies, channels, -1)
    turned = jnp.einsum("dc,hdn->hcn", turn, rows, precision=PRECISION)
    kernel.set_value(turned.reshape(weight.shape).astype(weight.dtype))


def _outputs(layer: DecoderLayer, config: DecoderConfig, *, is_rotated: bool) -> jax.Array:
    """The layer's output for a random residual stream, float32, in unrotated channels."""
    stream = stream_rotation(config)
    shape = 1, CHECKED_TOKENS, config.hidden_size
    hidden = jax.random.normal(jax.random.key(OF_CHECK), shape)
    positions = jnp.arange(CHECKED_TOKENS, dtype=jnp.float32)[None, :, None]
    angles = jnp.broadcast_to(positions, (1, CHECKED_TOKENS, config.head_dim // 2))
    read = _turned(hidden, stream) if is_rotated else hidden
    added = _run(layer, read, dict.fromkeys(ROPES, angles)) - read
    return _product(added, stream.T) if is_rotated else added


@jax.jit
def _run(layer: DecoderLayer, hidden: jax.Array, angles: dict[str, jax.Array]) -> jax.Array:
    # In float32, since a layer may add too little to the stream for 16 bits.
    graph, state = nnx.split(layer)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), state)
    return nnx.merge(graph, wide).inputs(hidden, angles)[0]


def _turned(array: jax.Array, turn: jax.Array) -> jax.Array:
    return _product(array.astype(jnp.float32), turn).astype(array.dtype)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=PRECISION)
