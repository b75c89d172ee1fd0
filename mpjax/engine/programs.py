"""The programs of an engine as pure functions: prefill, decode, clear pages, copy states.

`compiled` jits them for a few argument sizes, with the state donated.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.engine.controlled import with_masks
from mpjax.engine.histories import extend_histories
from mpjax.engine.pages import NOWHERE
from mpjax.engine.watching import Watching
from mpjax.generation import decoding
from mpjax.generation.loop import Loop, several
from mpjax.generation.speculation.proposer import Speculated
from mpjax.generation.state import State, row_writer
from mpjax.generation.step import Read, step
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache
from mpjax.models.watch import Captured
from mpjax.sampling.draw import logprobs, top_logprobs
from mpjax.sampling.settings import RowSettings

Class = TypeVar("Class")


@typing.dataclass_transform(frozen_default=True)
def _arrays(cls: type[Class]) -> type[Class]:
    """A frozen dataclass whose fields are all arrays, as a pytree."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@_arrays
class Reading:
    """The arguments of a prefill program, as NumPy arrays.

    tokens: int32 [tokens], the tokens of all pieces end to end (varlen), then padding.
    following: int32 [tokens], the token after each in its row; 0 if it is not known.
    slots: int32 [pieces], the slot of each piece's row; for padding the number of slots.
    starts, counts: int32 [pieces], the position of each piece's first token, and its length.
    tables: int32 [pieces, columns] for each group of layers, the block tables, cut to the columns
        in use.
    encoded: int32 [pieces], the number of tokens in encoded blocks; see Span.
    drawn: int32 [pieces], the number of the row's new tokens so far.
    is_first: bool [pieces], whether the piece is the first in its slot.
    is_last: bool [pieces], whether the next token is drawn after the piece.
    settings: of each piece's row.
    rotary_lengths: int32 [pieces], of each piece's row; None as in DecoderCache.
    adapters: int32 [pieces], as in DecoderCache; None if no row has an adapter.
    masks: uint32 [pieces, 1, words], bit masks of the tokens allowed after each piece; None for
        programs without processors.
    watching: captures and changes of the rows' activations, or None.
    """

    tokens: Any
    following: Any
    slots: Any
    starts: Any
    counts: Any
    tables: Any
    encoded: Any
    drawn: Any
    is_first: Any
    is_last: Any
    settings: RowSettings
    rotary_lengths: Any = None
    adapters: Any = None
    masks: Any = None
    watching: Watching | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "entries", "pages", "adapters", "watching"],
    meta_fields=["columns"],
)
@dataclasses.dataclass(frozen=True)
class Stepping:
    """The arguments of a decoding program, as NumPy arrays.

    slots: int32 [rows]; for padding the number of slots.
    entries: int32 [rows], the index in each row's block tables that gets a new page; out of range
        for rows that get none. pages: int32 [rows] for each group of layers, the new pages.
    columns: the width of block tables that holds all pages of the rows (static).
    adapters: int32 [rows], as in DecoderCache; None if no row has an adapter.
    watching: as in Reading.
    """

    slots: Any
    entries: Any
    pages: Any
    columns: int
    adapters: Any = None
    watching: Watching | None = None

    def grown(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The block tables of all slots, after writing the rows' new pages."""
        return tuple(
            table.at[self.slots, self.entries].set(pages, mode="drop")
            for table, pages in zip(tables, self.pages, strict=True)
        )

    def read(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The rows' block tables cut to the columns in use, [rows, columns]."""
        return tuple(
            table if table.shape[1] == self.columns else table[:, : self.columns]
            for table in tables
        )


@_arrays
class Drawn:
    """The tokens that a program has drawn.

    packed: int32 [rows, 2 · steps + 2], which `arrays` takes apart: one copy to the host takes less
        time than four.
    top_logprobs: the likeliest ids at each position, and their log-probabilities, int32 and float32
        [rows, steps, number]; None in programs for greedy rows.
    speculated: how many tokens were proposed and accepted; None without speculation.
    captured: activations by point and layer: [rows, steps, ...], or in a prefill program [1,
        tokens, ...]; None without captures.
    """

    packed: Any
    top_logprobs: Any = None
    speculated: Speculated | None = None
    captured: Captured | None = None

    @classmethod
    def of(cls, tokens: Any, logprobs: Any, counts: Any, running: Any, **rest: Any) -> Self:
        """The Drawn of tokens and logprobs [rows, steps], and of counts and running [rows]."""
        bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
        numbers = (each[:, None].astype(jnp.int32) for each in (counts, running))
        return cls(jnp.concatenate([tokens, bits, *numbers], axis=1), **rest)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Tokens, logprobs, counts and running, on the host; waits for the program.

        int32 and float32 [rows, steps], int32 [rows] drawn tokens, and bool [rows], whether the row
        has not ended.
        """
        packed = np.asarray(self.packed)
        steps = packed.shape[1] // 2 - 1
        tokens, bits = packed[:, :steps], packed[:, steps : 2 * steps]
        return tokens, bits.view(np.float32), packed[:, -2], packed[:, -1].astype(bool)


@_arrays
class PromptScores:
    """Log-probabilities after each prefilled token: of its row's next token, and of the likeliest.

    logprobs: float32 [tokens], meaningless where the next token is not known.
    top, top_logprobs: int32 and float32 [tokens, number], likeliest first; all but the first are
        meaningless if no row asks for more.
    """

    logprobs: Any
    top: Any
    top_logprobs: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """logprobs, top and top_logprobs."""
        return self.logprobs, self.top, self.top_logprobs


def extend(
    model: Decoder,
    state: State,
    reading: Reading,
    *,
    greedy: bool = False,
    scored: bool = False,
    width: int | None = None,
) -> tuple[State, Drawn, PromptScores | None]:
    """Prefills pieces of prompts, and draws the next token of rows whose prefill ends.

    greedy: whether all rows are known to be greedy (static); see `RowSettings.likeliest`. scored:
        whether to compute log-probabilities of the prompts' tokens (static). width: the number of
        tokens to which each piece is padded; None for varlen pieces (static).
    """
    slots, last = reading.slots, len(state.counts) - 1
    begun = _begun(state, reading, greedy=greedy)
    if reading.watching is not None:
        size, offsets = len(reading.tokens), jnp.cumsum(reading.counts) - reading.counts
        of_token = None if width is not None else tokens_of(reading.counts, size).sequence
        at = jnp.stack([jnp.zeros_like(offsets), reading.starts - offsets])
        watch = functools.partial(reading.watching.begin, model.config, sequences=of_token)
        begun = dataclasses.replace(begun, cache=watch(begun.cache, (1, size), at))

    def read(cache: DecoderCache) -> Read:
        if width is not None:
            return _read_padded(model, reading, cache, width, scored=scored)
        logits, cache = model.step_varlen(
            reading.tokens,
            reading.counts,
            cache,
            encoded=None if cache.format.block is None else reading.encoded,
            every_position=scored,
        )
        return _scored(logits, cache, reading) if scored else Read(logits, cache)

    after, found = step(model, begun, read, reading.is_last)
    state = state.with_rows(slots, after)
    put = row_writer(slots)
    put_tables = functools.partial(_put_tables, slots)
    tables = jax.tree.map(put_tables, state.cache.tables, reading.tables)
    drawing = jnp.where(reading.is_last, slots, last + 1)
    state = dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, tables=tables),
        settings=jax.tree.map(put, state.settings, reading.settings),
        speculation=extend_histories(state.speculation, drawing, after.cache.lengths, after.newest),
    )
    draw = found.draw
    rest = {"top_logprobs": draw.top_logprobs, "captured": after.cache.captured}
    drawn = Drawn.of(draw.tokens, draw.logprobs, found.counts, after.running, **rest)
    return state, drawn, found.scores


def _read_padded(
    model: Decoder, reading: Reading, cache: DecoderCache, width: int, *, scored: bool
) -> Read:
    """Prefills pieces of up to `width` tokens as rows of a padded batch."""
    counts, most = reading.counts, len(reading.tokens) - 1
    places = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(width)[None]
    tokens = reading.tokens[jnp.minimum(places, most)]
    logits, cache = model.step(tokens, counts, cache, every_position=scored)
    if not scored:
        return Read(logits, cache)
    found = tokens_of(counts, len(reading.tokens))
    return _scored(logits[found.sequence, found.number], cache, reading)


def _scored(logits: jax.Array, cache: DecoderCache, reading: Reading) -> Read:
    """Scores all tokens, and keeps the logits after each piece.

    logits: [tokens, vocabulary], after each token.
    """
    top = top_logprobs(logits, reading.settings.top_logprobs, always=1)
    scores = PromptScores(logprobs(logits, reading.following), *top)
    return Read(logits[jnp.maximum(jnp.cumsum(reading.counts) - 1, 0)], cache, scores)


def _begun(state: State, reading: Reading, *, greedy: bool) -> State:
    """The state of a prefill program's rows before it: gathered from the slots, or of `reading`."""
    own = jnp.minimum(reading.slots, len(state.counts) - 1)
    return State(
        dataclasses.replace(
            state.cache.rows(own),
            tables=reading.tables,
            lengths=reading.starts,
            rotary_lengths=reading.rotary_lengths,
            adapters=reading.adapters,
        ),
        newest=state.newest[own],
        counts=reading.drawn,
        running=reading.is_last,
        settings=reading.settings.likeliest if greedy else reading.settings,
        processors=with_masks(tuple(one.rows(own) for one in state.processors), reading.masks),
    )


def _put_tables(slots: jax.Array, target: jax.Array, tables: jax.Array) -> jax.Array:
    """Writes the rows' block tables, padded with NOWHERE, into those of all slots."""
    missing = target.shape[1] - tables.shape[1]
    if missing:
        tables = jnp.pad(tables, ((0, 0), (0, missing)), constant_values=NOWHERE)
    written: jax.Array = row_writer(slots)(target, tables)
    return written


def decode(
    model: Decoder,
    state: State,
    stepping: Stepping,
    *,
    steps: int,
    greedy: bool,
    waits: bool = False,
) -> tuple[State, Drawn]:
    """Decodes up to `steps` tokens of some rows, in one loop on the device.

    steps: decoding steps (static). greedy: as for `extend` (static).
    waits: whether the loop ends early when all rows have ended (static). XLA launches all steps of
        a loop of known length without waiting, so the caller continues while the GPU works. A while
        loop makes the host wait for the GPU in each step.
    """
    state, loop = begin_loop(model, state, stepping, steps, greedy=greedy)

    if waits and steps > 1:
        end = decoding.decode(model, loop, jnp.int32(steps), stride=1)
    else:
        end = several(lambda loop: loop.advance(model, loop.goes_on(steps)), steps, loop)
    return state.with_rows(stepping.slots, end.state), drawn_of(end)


def begin_loop(
    model: Decoder, state: State, stepping: Stepping, columns: int, *, greedy: bool
) -> tuple[State, Loop]:
    """The initial Loop of a program that draws up to `columns` tokens of some rows.

    Also returns the state of all slots, with the rows' new pages in their block tables.
    """
    cache = dataclasses.replace(state.cache, tables=stepping.grown(state.cache.tables))
    state = dataclasses.replace(state, cache=cache)
    rows = state.rows(stepping.slots, greedy=greedy)
    own = {"tables": stepping.read(rows.cache.tables), "adapters": stepping.adapters}
    cache = dataclasses.replace(rows.cache, **own)
    if stepping.watching is not None:
        size = len(rows.counts)
        at = jnp.stack([jnp.arange(size, dtype=jnp.int32), cache.lengths])
        cache = stepping.watching.begin(model.config, cache, (size, columns), at)
    rows = dataclasses.replace(rows, cache=cache)
    return state, Loop.begin(rows, columns, model.columns)


def drawn_of(end: Loop) -> Drawn:
    """The tokens that a finished loop has drawn."""
    rest = {"top_logprobs": end.top_logprobs, "captured": end.state.cache.captured}
    return Drawn.of(end.tokens, end.logprobs, end.drawn, end.state.running, **rest)


def clear(model: Decoder, state: State, pages: tuple[jax.Array, ...], slot: jax.Array) -> State:
    """Sets pages and a slot's recurrent states to zero, since a row may have left NaN there.

    pages: int32 [any number] for each group of layers. slot: int32 scalar; out of range for none.
    """
    return _with_layers(state, model.clear_states(state.cache.layers, pages, slot[None]))


def copy(model: Decoder, state: State, source: jax.Array, target: jax.Array) -> State:
    """Copies a row's recurrent states from a slot to a snapshot, or back.

    source, target: int32 scalars; a target out of range changes nothing.
    """
    return _with_layers(state, model.copy_states(state.cache.layers, source, target))


def _with_layers(state: State, layers: tuple[Any, ...]) -> State:
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))
