"""The logits processors of an engine's slots.

They are created when the first request with processors comes; only programs with such a row take
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.constraints.automaton import SmallTable, TableMatcher
from mpjax.constraints.kinds import Constraint
from mpjax.constraints.matcher import WORD, Matcher, mask_words
from mpjax.engine.sizes import Sizes
from mpjax.generation.state import State
from mpjax.language_model import LanguageModel
from mpjax.sampling.controls import changes_logits, controls
from mpjax.sampling.processors import Attached, Attachment, Processor, attach
from mpjax.sampling.rules import TokenRule
from mpjax.sampling.settings import Sampling

SMALL_BYTES = 1 << 14  # of an array that is joined with others for one copy to the device


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["processors", "active"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Control:
    """The processors of one request, as NumPy arrays without an axis of rows.

    active: for each processor of the engine, whether the request has it; a NumPy bool.
    """

    processors: tuple[Any, ...]
    active: tuple[Any, ...]

    @property
    def is_masked_alone(self) -> bool:
        """Whether the only processor of the request is the masks that the host computes."""
        pairs = zip(self.processors, self.active, strict=True)
        return all(isinstance(one, Masked) for one, active in pairs if active)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["positions"])
@dataclasses.dataclass(frozen=True)
class Masked(Processor):
    """Masks logits with the bit masks that the host passes to each program.

    positions: the number of positions that a step samples (static).
    """

    positions: int

    def create(self, vocabulary: int) -> tuple[jax.Array, jax.Array]:
        """The initial memory of a row: bit masks that allow all tokens, and the next mask's index.

        Masks are uint32 [positions, words], in the layout of a Matcher.
        """
        words = mask_words(vocabulary)
        return jnp.full((self.positions, words), ~np.uint32(0)), jnp.int32(0)

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that are not allowed."""
        masks, place = memory
        bits = masks[place][:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None] & 1
        return jnp.where(bits.reshape(-1)[: len(logits)] == 1, logits, -jnp.inf)

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The bit masks, and the index of the next mask."""
        masks, place = memory
        return masks, place + is_new.astype(jnp.int32)


def with_masks(attached: Attachment, masks: jax.Array | None) -> Attachment:
    """Replaces the rows' masks, uint32 [rows, positions or 1, words]; None changes nothing."""

    def masked(one: Attached) -> Attached:
        if masks is None or not isinstance(one.processor, Masked):
            return one
        old, place = one.memory
        new = jnp.broadcast_to(masks, old.shape)
        return dataclasses.replace(one, memory=(new, jnp.zeros_like(place)))

    return tuple(map(masked, attached))


def masks_alone(masks: jax.Array) -> Attachment:
    """The processors of rows that have masks alone, uint32 [rows, 1, words]."""
    rows, positions, _ = masks.shape
    memory = masks, jnp.zeros(rows, jnp.int32)
    return (Attached(Masked(positions), memory, jnp.ones(rows, bool)),)


def constraint_places(lm: LanguageModel, sizes: Sizes) -> tuple[Processor, ...]:
    """The processors for constraints: masks by the host and, if enabled, tables on the device."""
    states, masked = sizes.table_states, Masked(1 + sizes.proposed)
    return (masked, SmallTable.place(lm.model.columns, states)) if states else (masked,)


def rule_places(
    lm: LanguageModel, processors: Sequence[Processor], max_tokens: int
) -> tuple[Processor, ...]:
    """An engine's processors, with the rules of the model's own sampling that are not among them.

    max_tokens: as for Engine, for rules that remember tokens.
    """
    own = () if lm.sampling is None else lm.sampling.rules or ()
    given = [one for one in processors if isinstance(one, TokenRule)]
    every = (*(one for one in own if one not in given), *processors)
    # max_tokens excludes a row's last token.
    return tuple(one.sized(max_tokens + 1) if isinstance(one, TokenRule) else one for one in every)


def read_constraint(
    lm: LanguageModel,
    constraint: Constraint,
    stop_ids: Sequence[int],
    processors: Sequence[Processor],
) -> tuple[Processor, Matcher | TableMatcher]:
    """The processor of a request's constraint, and the matcher that follows its text on the host.

    stop_ids: the row's. processors: the engine's. Raises the ValueErrors of Matcher.
    """
    places = (one for one in processors if isinstance(one, SmallTable))
    tables = (place.of_constraint(lm, constraint, stop_ids) for place in places)
    if (table := next(tables, None)) is not None:
        return table, TableMatcher(table, stop_ids)
    masked = next(one for one in processors if isinstance(one, Masked))
    return masked, Matcher(lm, constraint, stop_ids)


def create_control(lm: LanguageModel, slots: int, processors: Sequence[Processor]) -> Attachment:
    """The processors of empty slots: those of Sampling, then the engine's own."""
    none = no_control(lm, processors)
    wide = (
        jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), one)
        for one in none.processors
    )
    attached = (attach(one, slots, lm.model.columns, shared=False) for one in wide)
    return tuple(dataclasses.replace(one, active=jnp.zeros(slots, bool)) for one in attached)


def no_control(lm: LanguageModel, processors: Sequence[Processor]) -> Control:
    """The Control of a request that uses no processor. processors: those of the engine."""
    return _control(lm, Sampling(), processors, [False] * len(processors))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["small", "large"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PackedControl:
    """The leaves of a Control in few arrays, since each copy to the device takes long.

    small: uint8 [bytes], those of up to SMALL_BYTES, end to end. large: the others, on the device.
    """

    small: Any
    large: tuple[Any, ...]

    def read(self, shapes: Any) -> Any:
        """The leaves, in the structure of `shapes`, a tree of shapes and dtypes."""
        large, at = iter(self.large), 0

        def take(one: Any) -> Any:
            nonlocal at
            size = one.dtype.itemsize * one.size
            if size > SMALL_BYTES:
                return next(large)
            part, at = self.small[at : at + size], at + size
            if one.dtype == bool:
                return part.reshape(one.shape) != 0
            wide = part.reshape(*one.shape, one.dtype.itemsize)
            return jax.lax.bitcast_convert_type(wide if wide.shape[-1] > 1 else part, one.dtype)

        return jax.tree.map(take, shapes)


class OnDevice:
    """Packs Controls, without another copy of large neutral arrays on the device."""

    def __init__(self, lm: LanguageModel, processors: Sequence[Processor]) -> None:
        self._host = no_control(lm, processors)
        large = [leaf for leaf in jax.tree.leaves(self._host) if leaf.nbytes > SMALL_BYTES]
        self._none = [(leaf, jax.device_put(leaf)) for leaf in large]
        self._newest = list(self._none)

    def __call__(self, control: Control | None) -> PackedControl:
        """The packed Control; of a request without processors for None."""
        small: list[np.ndarray] = []
        large: list[jax.Array] = []
        for leaf in jax.tree.leaves(self._host if control is None else control):
            if leaf.nbytes > SMALL_BYTES:
                large.append(self._put(len(large), leaf))
            else:
                small.append(np.asarray(leaf).reshape(-1).view(np.uint8))
        return PackedControl(np.concatenate(small), tuple(large))

    def _put(self, place: int, leaf: Any) -> jax.Array:
        """A large leaf on the device: the neutral one, the last one copied, or a new copy."""
        for known, there in (self._none[place], self._newest[place]):
            if leaf is known:
                return there
        if np.array_equal(leaf, self._none[place][0]):
            return self._none[place][1]
        self._newest[place] = leaf, jax.device_put(leaf)
        return self._newest[place][1]


def read_control(
    lm: LanguageModel,
    sampling: Sampling,
    wanted: Sequence[Processor],
    processors: Sequence[Processor],
) -> Control:
    """The Control of a request whose Sampling has scalar fields.

    wanted: the request's own processors. processors: the engine's, each of which a request can use
    once. Raises ValueError for a wanted processor without a free counterpart in the engine.
    """
    own: list[Any] = list(processors)
    is_wanted = [False] * len(own)
    for one in wanted:
        places = [i for i, it in enumerate(processors) if _kind(it) == _kind(one)]
        free = [place for place in places if not is_wanted[place]]
        if not free:
            raise ValueError(
                f"processors has a {type(one).__name__} that the engine has no place for: give the "
                "engine one with arrays of the same shapes and dtypes, Engine(processors=...)"
            )
        own[free[0]], is_wanted[free[0]] = one, True
    return _control(lm, sampling, own, is_wanted)


def _control(
    lm: LanguageModel, sampling: Sampling, own: Sequence[Any], is_wanted: Sequence[bool]
) -> Control:
    vocabulary, columns = lm.config.vocab_size, lm.model.columns
    built = controls([sampling], 1, vocabulary, columns, every=True)
    first = jax.tree.map(lambda each: each[0], built)
    is_changed = changes_logits(sampling)
    active = [is_changed] * len(built) + [*is_wanted]
    processors = jax.tree.map(lambda x: np.asarray(x, jnp.result_type(x)), (*first, *own))
    return Control(processors, tuple(np.bool_(each) for each in active))


def _kind(processor: Processor) -> Any:
    """The pytree structure, shapes and dtypes that interchangeable processors have in common."""
    leaves, structure = jax.tree.flatten(processor)
    return structure, [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def begin_control(
    state: State,
    numbers: jax.Array,
    control: PackedControl | None,
    *,
    vocabulary: int,
    advances: bool,
) -> State:
    """The state with a new row's processors in its slot, advanced over the row's tokens.

    numbers: int32 [3 + tokens]: the slot, where an index out of range changes nothing, the number
    of the tokens that were read, of a new row the prompt's, the number of all tokens, and the row's
    prompt and new tokens, padded. control: None for the processors in the slot, which are advanced
    alone. vocabulary: the number of logits (static). advances: whether there are tokens behind
    those that were read (static); a loop over none would wait for the device.
    """
    (slot, begin, count), tokens = numbers[:3], numbers[3:]

    def advanced(one: Any) -> Any:
        if not advances:
            return one

        def advance(place: jax.Array, memory: Any) -> Any:
            return one.processor.advance(memory, tokens[place], jnp.bool_(True))

        memory = jax.lax.fori_loop(begin, count, advance, one.memory)
        return dataclasses.replace(one, memory=memory)

    def begun(one: Any, processor: Any, active: jax.Array) -> Any:
        memory = processor.read(processor.create(vocabulary), tokens, begin)
        return dataclasses.replace(one, processor=processor, memory=memory, active=active)

    own = tuple(jax.tree.map(lambda leaf: leaf[slot], one) for one in state.processors)
    if control is not None:
        known = tuple(one.processor for one in own), tuple(one.active for one in own)
        own = tuple(map(begun, own, *control.read(known)))

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot].set(new, mode="drop")

    found = jax.tree.map(put, state.processors, tuple(map(advanced, own)))
    return dataclasses.replace(state, processors=found)
