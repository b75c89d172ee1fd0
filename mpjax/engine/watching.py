"""Captures and changes of activations, by request.

Rows of equal kind, which capture the same layers and have changes of equal shapes, are in programs
of their own; all other rows run the programs of an engine without such requests.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.engine.state import committed
from mpjax.kernels.checks import shown
from mpjax.models import Decoder, Steer
from mpjax.models.config import DecoderConfig
from mpjax.models.state import DecoderCache
from mpjax.models.watch import empty_captured, read_capture, read_steer

Capture = tuple[tuple[str, tuple[int, ...]], ...]  # points with layers
Steers = Steer | tuple[Steer, ...] | list[Any] | None  # of all prompts, or a list of each one's


@dataclasses.dataclass(frozen=True)
class Watched:
    """The activations that are captured and steered in one request.

    steer: with arrays on the device. kind: equal for rows that can be in one program. key: a digest
    of the steers, 32 bytes, on which the row's keys and values depend; empty without steers.
    """

    capture: Capture
    steer: tuple[Steer, ...]
    kind: Hashable
    key: bytes


class Watches:
    """Reads the `capture` and `steer` arguments of an engine's requests."""

    def __init__(self) -> None:
        # A number for each pytree structure, which may have functions that can't be hashed to
        # bytes.
        self._structures: dict[Any, int] = {}
        self._numbers = itertools.count()

    def read(self, capture: Mapping[str, Sequence[int]], steer: Sequence[Steer]) -> Watched | None:
        """The Watched of checked arguments; None for a request without either."""
        if not capture and not steer:
            return None
        arrays = (jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in jax.tree.leaves(steer))
        leaves, structure = committed([*arrays]), jax.tree.structure(tuple(steer))
        number = self._structures.setdefault(structure, next(self._numbers))
        digest = hashlib.sha256(number.to_bytes(8))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        for leaf, shape in zip(leaves, shapes, strict=True):
            digest.update(repr(shape).encode() + np.asarray(leaf).tobytes())
        points = tuple((point, tuple(layers)) for point, layers in sorted(capture.items()))
        changes = jax.tree.unflatten(structure, leaves)
        return Watched(points, changes, (points, number, shapes), digest.digest() if steer else b"")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["each", "sequences"],
    meta_fields=["layers", "at"],
)
@dataclasses.dataclass(frozen=True)
class OfSequences(Steer):
    """A change of each sequence's own.

    each: a Steer with arrays [batch, ...]. sequences: int32 [tokens], the sequence of each varlen
    token; None in a padded batch. layers, at: of `each`.
    """

    each: Any
    sequences: jax.Array | None
    layers: tuple[int, ...]
    at: str

    def __call__(self, value: jax.Array, layer: int, positions: jax.Array) -> jax.Array:
        """The value, in which each sequence is changed by its own Steer."""
        sequences = self.sequences
        if sequences is None:

            def change(own: Any, value: jax.Array, positions: jax.Array) -> Any:
                return own(value[None], layer, positions[None])[0]

            changed: jax.Array = jax.vmap(change)(self.each, value, positions)
            return changed

        def turn(number: jax.Array, found: jax.Array) -> jax.Array:
            own = jax.tree.map(lambda leaf: leaf[number], self.each)
            changed = own(value, layer, positions).astype(value.dtype)
            return jnp.where((sequences == number)[:, None], changed, found)

        count = len(jax.tree.leaves(self.each)[0])
        return jax.lax.fori_loop(0, count, turn, value)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["steers"], meta_fields=["capture"]
)
@dataclasses.dataclass(frozen=True)
class Watching:
    """The activations that a program captures, for all rows, and the steers of each row."""

    steers: tuple[tuple[Steer, ...], ...]
    capture: Capture

    @classmethod
    def of(cls, rows: Sequence[Watched | None], size: int) -> Watching | None:
        """The Watching of rows of one kind, padded to `size` rows; None if they are not watched."""
        if not rows or (first := rows[0]) is None:
            return None
        steers = [row.steer for row in rows if row is not None]
        return cls(tuple(steers + [first.steer] * (size - len(steers))), first.capture)

    @property
    def kind(self) -> Hashable:
        """The part of a program's key: captured layers, and the structure of the changes."""
        return self.capture, jax.tree.structure(self.steers)

    def begin(
        self,
        config: DecoderConfig,
        cache: DecoderCache,
        shape: tuple[int, int],
        at: jax.Array,
        sequences: jax.Array | None = None,
    ) -> DecoderCache:
        """The cache of a program's rows, with captures and changes in its steps.

        shape: the first two axes of captured arrays. at: `captured_at` of the cache. sequences: as
        in OfSequences.
        """
        steer = []
        for own in zip(*self.steers, strict=True):
            each = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
            # A change without arrays is the same for all rows.
            has_arrays = bool(jax.tree.leaves(each))
            one = OfSequences(each, sequences, own[0].layers, own[0].at) if has_arrays else own[0]
            steer.append(one)
        found = empty_captured(config, dict(self.capture), shape) if self.capture else None
        return dataclasses.replace(cache, steer=tuple(steer), captured=found, captured_at=at)


class CapturedParts:
    """The captured activations of a request so far, as NumPy arrays, part by part."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, dict[str, dict[int, np.ndarray]]]] = []

    def add(self, start: int, part: Any) -> None:
        """Adds arrays [tokens, ...] from position `start` on, in place of any from there on."""
        kept = []
        for begin, old in self._parts:
            if begin < start:
                kept.append((begin, jax.tree.map(lambda x, n=start - begin: x[:n], old)))
        self._parts = [*kept, (start, part)]

    def join(self, tokens: int) -> dict[str, dict[int, np.ndarray]] | None:
        """The arrays of the first `tokens` tokens, by point and layer; None without any."""
        parts = [part for _, part in self._parts]
        if not parts:
            return None
        found: dict[str, dict[int, np.ndarray]] = jax.tree.map(
            lambda *arrays: np.concatenate(arrays)[:tokens], *parts
        )
        return found


def read_watches(
    model: Decoder, capture: Any, steer: Any, rows: int
) -> list[tuple[dict[str, tuple[int, ...]], tuple[Steer, ...]]]:
    """The layers to capture and the changes of each request, checked.

    capture: of all requests, as for `Decoder.inspect`. steer: a Steer, or a tuple that is applied
    in order, of all requests; or a list with one of these, or None, for each.

    Raises ValueError as `Decoder.inspect`, and for a list of another length.
    """
    is_list = isinstance(steer, list)
    if is_list and len(steer) != rows:
        raise ValueError(
            f"steer is {shown(steer)}: expected a Steer, a tuple of them, or a list of {rows}, one "
            "for each prompt"
        )
    each = steer if is_list else [steer] * rows
    captured = read_capture(model, capture)
    return [(captured, read_steer(model, () if one is None else one)) for one in each]
