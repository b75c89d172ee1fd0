"""Logits processors: functions that change a row's logits before its next token is drawn.

A processor is a pytree that describes one row; programs `vmap` it over their rows. So each request
may have its own arrays, and a row depends neither on its neighbours nor on its slot.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import shown
from mpjax.sampling.random_keys import row_keys, step_keys

if TYPE_CHECKING:
    from mpjax.sampling.settings import RowSettings


class Processor:
    """Changes the logits of one row. A pytree whose methods are pure functions.

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass(frozen=True)
        class Alternate(mpjax.Processor):  # even ids at even places, odd ids at odd ones
            strength: jax.Array

            def __call__(self, logits, memory, number):
                ids = jnp.arange(len(logits))
                return logits - self.strength * ((ids + number) % 2)

    Array fields are arguments of the compiled program; a new value of a static field recompiles it.

    draws: whether `draw` replaces the final sampling of a token (static).
    filters: whether `filter` removes tokens after the temperature (static).
    of_sampling: whether it is one of those that each row of an engine has for its Sampling. They
        come before others.
    """

    draws = False
    filters = False
    of_sampling = False

    def create(self, vocabulary: int) -> Any:
        """The initial memory of a row: a pytree of arrays; empty by default.

        vocabulary: the number of logits.
        """
        return ()

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The memory after a row's prompt: the first `count` of tokens, int32 [tokens]."""
        return memory

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits to draw from, float32 [vocabulary]; -inf for a token that is not allowed.

        number: int32 scalar, the row's new tokens so far.
        """
        return logits

    def filter(self, logits: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that are not drawn, if `filters`.

        logits: float32 [vocabulary] of a row with a temperature, after it and after top-k, top-p
        and min-p. At least one must stay.
        """
        return logits

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The memory after a new token, an int32 scalar.

        is_new: bool scalar; if false, the row gets no token, and the memory must not change.
        """
        return memory

    def draw(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """The next token, an integer scalar, if `draws`; by default sampled from the logits.

        logits: float32 [vocabulary], after all processors, the temperature and the filters. key: a
        typed PRNG key, made of the row's seed and the token's index.
        """
        return jax.random.categorical(key, logits)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["processor", "memory", "active"],
    meta_fields=["shared"],
)
@dataclasses.dataclass(frozen=True)
class Attached:
    """A processor of a batch, with its memory of each row.

    processor: arrays [rows, …], or without an axis of rows if `shared` (static).
    memory: arrays [rows, …]. active: bool [rows], the rows that the processor applies to.
    """

    processor: Any
    memory: Any
    active: jax.Array
    shared: bool = False

    def map(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Maps `function(processor, memory, …)` over rows. arrays: [rows, …] each."""
        of_processor = None if self.shared else 0
        axes = (of_processor, *(0 for _ in (self.memory, *arrays)))
        return jax.vmap(function, in_axes=axes)(self.processor, self.memory, *arrays)

    def rows(self, slots: jax.Array) -> Attached:
        """The processor of the rows in `slots`, int32 [rows]."""
        return jax.tree.map(lambda each: each[slots], self)

    def put_memory(self, slots: jax.Array, rows: Attached) -> Attached:
        """Writes the rows' memory into `slots`; padding has a slot out of range."""
        memory = jax.tree.map(
            lambda old, new: old.at[slots].set(new, mode="drop"), self.memory, rows.memory
        )
        return dataclasses.replace(self, memory=memory)


Attachment = tuple[Attached, ...]


def attach(processor: Processor, rows: int, vocabulary: int, *, shared: bool) -> Attached:
    """A processor of empty rows. Arguments are as in Attached."""
    create = functools.partial(type(processor).create, vocabulary=vocabulary)
    axis = None if shared else 0
    memory = jax.vmap(create, in_axes=axis, axis_size=rows)(processor)
    return Attached(processor, memory, jnp.ones(rows, bool), shared)


def read(attached: Attachment, tokens: jax.Array, lengths: jax.Array) -> Attachment:
    """The processors after prompts, int32 [rows, tokens], padded, of int32 [rows] lengths."""
    return tuple(
        dataclasses.replace(
            one, memory=one.map(lambda p, m, t, n: p.read(m, t, n), tokens, lengths)
        )
        for one in attached
    )


def process(attached: Attachment, logits: jax.Array, numbers: jax.Array) -> jax.Array:
    """The processed logits, float32 [rows, vocabulary]. numbers: int32 [rows], new tokens."""
    logits = logits.astype(jnp.float32)

    def changed(logits: jax.Array, some: Attachment) -> jax.Array:
        for one in some:
            found = one.map(lambda p, m, z, n: p(z, m, n), logits, numbers)
            logits = jnp.where(one.active[:, None], found, logits)
        return logits

    number = sum(one.processor.of_sampling and not one.shared for one in attached)
    if own := attached[:number]:
        # Their passes over all logits take longer than the condition where no row has them.
        is_used = functools.reduce(jnp.logical_or, (one.active.any() for one in own))
        logits = jax.lax.cond(is_used, lambda x: changed(x, own), lambda x: x, logits)
    return changed(logits, attached[number:])


def advance(attached: Attachment, tokens: jax.Array, is_new: jax.Array) -> Attachment:
    """The processors after new tokens, int32 [rows, positions], where `is_new` (bool) is true."""
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
    """The processed logits at several positions, each after the proposed tokens before it.

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
    """The processors of a batch in which each row is repeated `positions` times."""

    def repeat(arrays: Any) -> Any:
        return jax.tree.map(lambda each: jnp.repeat(each, positions, axis=0), arrays)

    return tuple(
        dataclasses.replace(repeat(dataclasses.replace(one, processor=())), processor=one.processor)
        if one.shared
        else repeat(one)
        for one in attached
    )


def filter_own(attached: Attachment, logits: jax.Array) -> jax.Array:
    """The logits, float32 [rows, vocabulary], after the processors that filter."""
    for one in attached:
        if one.processor.filters:
            found = one.map(lambda p, m, z: p.filter(z), logits)
            logits = jnp.where(one.active[:, None], found, logits)
    return logits


def draw_own(
    attached: Attachment,
    logits: jax.Array,
    settings: RowSettings,
    numbers: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """The tokens int32 [rows]: drawn by the row's processor if it draws, otherwise `tokens`.

    logits: float32 [rows, vocabulary], after processors, temperature and filters.
    """
    for one in attached:
        if one.processor.draws:
            keys = step_keys(row_keys(settings.key_words), numbers)
            own = one.map(lambda p, m, z, key: p.draw(z, key), logits, keys)
            tokens = jnp.where(one.active, own.astype(jnp.int32), tokens)
    return tokens


def read_processors(processors: Any) -> tuple[Processor, ...]:
    """The checked argument `processors`, as a tuple. Raises ValueError."""
    found = (processors,) if isinstance(processors, Processor) else processors
    if not isinstance(found, Sequence) or not all(isinstance(one, Processor) for one in found):
        raise ValueError(
            f"processors are {shown(processors)}: expected a tuple of mpjax.Processor objects"
        )
    return tuple(found)
