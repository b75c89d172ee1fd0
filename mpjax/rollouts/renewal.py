"""Writes new weights over those of a model, in the format that each map has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.quantize import quantize_like
from mpjax.rollouts.sources import Piece

# The most weights that are rounded at a time: copies in float32 take memory beside both models.
CHUNK_WEIGHTS = 1 << 24
BLOCK = 128  # outputs of which a format may share scales: chunks begin at multiples of it
OUTPUT_AXES = {"words": -2, "parameters": -1, "channel_scales": -1}  # of a QuantizedTensor

Part = tuple[Any, Any]  # a kernel and a bias, or None


def renew_array(old: Any, new: Any, offset: float = 0.0) -> Any:
    """The array or packed tensor `new`, copied to the memory of the old one, which is donated.

    It gets the old one's dtype and devices. offset: is added to it.
    """
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    copied = [
        one if one is other else _copied(one, _near(other, one), offset) for one, other in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(old), copied)


def renew_parts(
    parts: Sequence[Part], pieces: dict[Piece, list[Any]], *, keep_scales: bool
) -> Sequence[Part]:
    """The parts of a linear place with new weights in some of their outputs; the old are donated.

    pieces: arrays as `Sources.linears` has them. keep_scales: as `quantize_like` has it.
    """
    old = jax.tree.leaves(parts)[0]
    values = [[_near(array, old) for array in arrays] for arrays in pieces.values()]
    found: Sequence[Part] = _renewed(
        tuple(parts), values, tuple(pieces), keep_scales, CHUNK_WEIGHTS
    )
    return found


def largest_values(values: Sequence[Any]) -> np.ndarray:
    """The largest magnitude of each array, float32; NaN and infinity stay. The host waits once."""
    by_devices: dict[Any, list[int]] = {}
    for number, value in enumerate(values):
        where = frozenset(value.devices()) if isinstance(value, jax.Array) else None
        by_devices.setdefault(where, []).append(number)
    found = np.zeros(len(values), np.float32)
    waiting = [(own, _largest([values[i] for i in own])) for own in by_devices.values()]
    for own, largest in waiting:
        found[own] = np.asarray(largest)
    return found


@jax.jit
def _largest(values: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.abs(value).max(initial=0).astype(jnp.float32) for value in values])


def _near(value: Any, old: jax.Array) -> jax.Array:
    """The value on the devices of `old`, to which it is moved if it is on others."""
    if isinstance(value, jax.Array) and value.sharding == old.sharding:
        return value
    return jax.device_put(value, old.sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2, keep_unused=True)
def _copied(old: jax.Array, new: jax.Array, offset: float) -> jax.Array:
    new = new.reshape(old.shape)
    return (new.astype(jnp.float32) + offset if offset else new).astype(old.dtype)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3, 4))
def _renewed(
    parts: tuple[Part, ...],
    values: list[list[jax.Array]],
    pieces: tuple[Piece, ...],
    keep_scales: bool,
    chunk: int,
) -> tuple[Part, ...]:
    found = [*parts]
    for piece, arrays in zip(pieces, values, strict=True):
        kernel, bias = found[piece.part]
        new = _outputs(piece, arrays)
        if piece.is_bias:
            bias = _put_plain(bias, new, piece)
        elif isinstance(kernel, QuantizedTensor):
            kernel = _put_packed(kernel, new, piece, keep_scales, chunk)
        else:
            kernel = _put_plain(kernel, new, piece)
        found[piece.part] = kernel, bias
    return tuple(found)


def _outputs(piece: Piece, arrays: Sequence[jax.Array]) -> jax.Array:
    """The weights [..., in, outputs] of a piece, or its biases, with the axis of experts first."""
    array = arrays[0] if piece.experts is None else jnp.stack(arrays)
    if piece.is_file and not piece.is_bias:
        array = array.swapaxes(-1, -2)
    array = jax.lax.slice_in_dim(array, piece.first, piece.first + piece.end - piece.begin, axis=-1)
    if piece.alternates:
        array = array.reshape(*array.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(array.shape)
    return array


def _put_plain(whole: jax.Array, new: jax.Array, piece: Piece) -> jax.Array:
    outputs, new = slice(piece.begin, piece.end), new.astype(whole.dtype)
    if piece.experts is None:
        return whole.at[..., outputs].set(new)
    return whole.at[np.asarray(piece.experts), ..., outputs].set(new)


def _put_packed(
    kernel: QuantizedTensor, new: jax.Array, piece: Piece, keep_scales: bool, chunk: int
) -> QuantizedTensor:
    """The kernel with new outputs, rounded a chunk at a time."""
    put = functools.partial(_put_rounded, begin=piece.begin, keep_scales=keep_scales, chunk=chunk)
    if new.ndim == 2:
        return put((kernel, new))
    at_once = max(1, chunk // (new.shape[-2] * new.shape[-1]))
    experts = piece.experts
    if experts is None or experts == tuple(range(len(kernel.words))):
        return jax.lax.map(put, (kernel, new), batch_size=at_once)
    numbers = np.asarray(experts)
    some = jax.lax.map(put, (jax.tree.map(lambda x: x[numbers], kernel), new), batch_size=at_once)
    return jax.tree.map(lambda whole, own: whole.at[numbers].set(own), kernel, some)


def _put_rounded(
    pair: tuple[QuantizedTensor, jax.Array], begin: int, keep_scales: bool, chunk: int
) -> QuantizedTensor:
    """The kernel [K, N] with its outputs from `begin` on replaced by rounded [K, outputs]."""
    kernel, weights = pair
    channels, outputs = weights.shape
    size = min(outputs, max(BLOCK, chunk // channels // BLOCK * BLOCK))

    def put(at: Any, kernel: QuantizedTensor, size: int) -> QuantizedTensor:
        own = jax.lax.dynamic_slice_in_dim(weights, at, size, 1)
        new = quantize_like(own, _take(kernel, begin + at, size), keep_scales=keep_scales)
        return _put(kernel, new, begin + at)

    whole = outputs // size
    if whole == 1:
        kernel = put(0, kernel, size)
    else:
        kernel = jax.lax.fori_loop(0, whole, lambda i, found: put(i * size, found, size), kernel)
    return put(whole * size, kernel, outputs % size) if outputs % size else kernel


def _take(kernel: QuantizedTensor, begin: Any, size: int) -> QuantizedTensor:
    """The tensor with only `size` outputs from `begin` on."""
    found: dict[str, Any] = {
        name: jax.lax.dynamic_slice_in_dim(array, begin, size, array.ndim + axis)
        for name, axis in OUTPUT_AXES.items()
        if (array := getattr(kernel, name)) is not None
    }
    return dataclasses.replace(kernel, **found)


def _put(kernel: QuantizedTensor, new: QuantizedTensor, begin: Any) -> QuantizedTensor:
    """The tensor with its outputs from `begin` on replaced by those of `new`."""
    found: dict[str, Any] = {
        name: jax.lax.dynamic_update_slice_in_dim(
            array, getattr(new, name), begin, array.ndim + axis
        )
        for name, axis in OUTPUT_AXES.items()
        if (array := getattr(kernel, name)) is not None
    }
    return dataclasses.replace(kernel, **found)
