"""Logits processors: functions that change a row's logits before its next token is drawn.

A processor is a pytree, and describes one row; programs map it over their rows. So its arrays may
be other ones for each request, and a row depends neither on its neighbours nor on its slot.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import shown
from mpjax.sampling.random_keys import row_keys, step_keys
from mpjax.sampling.settings import RowSettings


class Processor:
    """Changes the logits of one row. A pytree, whose methods are pure functions.

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass(frozen=True)
        class Alternate(mpjax.Processor):  # even ids at even places, odd ids at odd ones
            strength: jax.Array

            def __call__(self, logits, memory, number):
                ids = jnp.arange(len(logits))
                return logits - self.strength * ((ids + number) % 2)

    Arrays are parameters, of which other values run the same program. Static fields don't.

    draws: whether `draw` takes the place of the last step, in which a token is drawn (static).
    """

    draws = False

    def create(self, vocabulary: int) -> Any:
        """What is remembered of a row without tokens: a pytree of arrays. Nothing by default.

        vocabulary: the number of logits.
        """
        return ()

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The memory behind a row's prompt: the first `count` of int32 [tokens]."""
        return memory

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits to draw from, float32 [vocabulary]; -inf for a token that is not allowed.

        number: int32 scalar, the row's new tokens so far.
        """
        return logits

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The memory behind a new token, int32 scalar.

        is_new: bool scalar; where it is false, the row gets no token, and the memory has to stay.
        """
        return memory

    def draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """The next token, an integer scalar, if `draws`; one by the logits' probabilities here.

        logits: float32 [vocabulary], behind all processors, the temperature and the filters. key: a
        typed PRNG key, of the row's seed and the number of the token.
        """
        return jax.random.categorical(key, logits)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["processor", "memory", "active"],
    meta_fields=["shared"],
)
@dataclasses.dataclass(frozen=True)
class Attached:
    """A processor of a program's rows, and what it remembers of each.

    processor: arrays [rows, …], or without the rows' axis if `shared` (static).
    memory: arrays [rows, …]. active: bool [rows], the rows that it is for.
    """

    processor: Any
    memory: Any
    active: jax.Array
    shared: bool = False

    def map(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """`function(processor, memory, …)` of each row. arrays: [rows, …] each."""
        of_processor = None if self.shared else 0
        axes = (of_processor, *(0 for _ in (self.memory, *arrays)))
        return jax.vmap(function, in_axes=axes)(self.processor, self.memory, *arrays)

    def rows(self, slots: jax.Array) -> Attached:
        """The processor of the rows in some slots, int32 [rows]."""
        return jax.tree.map(lambda each: each[slots], self)

    def put_memory(self, slots: jax.Array, rows: Attached) -> Attached:
        """With the memory of the rows in some slots; padding has a slot too high."""
        memory = jax.tree.map(
            lambda old, new: old.at[slots].set(new, mode="drop"), self.memory, rows.memory
        )
        return dataclasses.replace(self, memory=memory)


Attachment = tuple[Attached, ...]


def attach(processor: Processor, rows: int, vocabulary: int, *, shared: bool) -> Attached:
    """A processor of rows without tokens. Arguments are those of Attached."""
    create = functools.partial(type(processor).create, vocabulary=vocabulary)
    axis = None if shared else 0
    memory = jax.vmap(create, in_axes=axis, axis_size=rows)(processor)
    return Attached(processor, memory, jnp.ones(rows, bool), shared)


def read(attached: Attachment, tokens: jax.Array, lengths: jax.Array) -> Attachment:
    """With the memory behind prompts, int32 [rows, tokens], padded, of int32 [rows] lengths."""
    return tuple(
        dataclasses.replace(
            one, memory=one.map(lambda p, m, t, n: p.read(m, t, n), tokens, lengths)
        )
        for one in attached
    )


def process(attached: Attachment, logits: jax.Array, numbers: jax.Array) -> jax.Array:
    """The logits to draw from, float32 [rows, vocabulary]. numbers: int32 [rows], new tokens."""
    logits = logits.astype(jnp.float32)
    for one in attached:
        found = one.map(lambda p, m, z, n: p(z, m, n), logits, numbers)
        logits = jnp.where(one.active[:, None], found, logits)
    return logits


def advance(attached: Attachment, tokens: jax.Array, is_new: jax.Array) -> Attachment:
    """With the memory behind new tokens, int32 [rows, positions], where bool `is_new` is true."""
    for place in range(tokens.shape[1]):
        attached = tuple(
            dataclasses.replace(
                one,
                memory=one.map(
                    lambda p, m, t, new: p.advance(m, t, new),
                    tokens[:, place],
                    is_new[:, place] & one.active,
                ),
            )
            for one in attached
        )
    return attached


def process_along(
    attached: Attachment, logits: jax.Array, drafts: jax.Array, numbers: jax.Array
) -> jax.Array:
    """The logits to draw from at several positions, each behind the proposed tokens before it.

    logits: [rows, positions, vocabulary]. drafts: int32 [rows, positions - 1].
    """

    def turn(attached: Attachment, place: Any) -> tuple[Attachment, jax.Array]:
        logits, tokens, number = place
        found = process(attached, logits, number)
        return advance(attached, tokens[:, None], jnp.ones((len(tokens), 1), bool)), found

    positions = logits.shape[1]
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    places = numbers[:, None] + jnp.arange(positions)[None]
    by_place = (jnp.swapaxes(each, 0, 1) for each in (logits, tokens, places))
    _, found = jax.lax.scan(turn, attached, tuple(by_place))
    return jnp.swapaxes(found, 0, 1)


def repeated(attached: Attachment, positions: int) -> Attachment:
    """The processors of a batch that has a row for each of `positions` positions of a row."""

    def repeat(arrays: Any) -> Any:
        return jax.tree.map(lambda each: jnp.repeat(each, positions, axis=0), arrays)

    return tuple(
        dataclasses.replace(repeat(dataclasses.replace(one, processor=())), processor=one.processor)
        if one.shared
        else repeat(one)
        for one in attached
    )


def draw_own(
    attached: Attachment,
    logits: jax.Array,
    settings: RowSettings,
    numbers: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """The tokens int32 [rows] of the rows whose processors draw them, and `tokens` of the others.

    logits: float32 [rows, vocabulary], as the last step takes them.
    """
    for one in attached:
        if one.processor.draws:
            keys = step_keys(row_keys(settings.key_words), numbers)
            own = one.map(lambda p, m, z, key: p.draw(z, key), logits, keys)
            tokens = jnp.where(one.active, own.astype(jnp.int32), tokens)
    return tokens


def read_processors(processors: Any) -> tuple[Processor, ...]:
    """The argument `processors` of functions that generate. Raises ValueError."""
    found = (processors,) if isinstance(processors, Processor) else processors
    if not isinstance(found, Sequence) or not all(isinstance(one, Processor) for one in found):
        raise ValueError(
            f"processors are {shown(processors)}: expected a tuple of mpjax.Processor objects"
        )
    return tuple(found)
