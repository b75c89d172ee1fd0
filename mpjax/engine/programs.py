"""The programs of an engine as pure functions: read pieces, decode, clear pages, copy states.

`compiled` jits them, with few sizes of their arguments and the state donated.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax.engine.controlled import with_masks
from mpjax.engine.histories import extend_histories
from mpjax.engine.pages import NOWHERE
from mpjax.generation import decoding
from mpjax.generation.loop import Loop, several
from mpjax.generation.speculation.proposer import Speculated
from mpjax.generation.state import State, row_writer
from mpjax.generation.step import Read, step
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache
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
    """Pieces of prompts to read, as NumPy's arrays.

    tokens: int32 [tokens], those of all pieces one after another, and padding behind them.
    following: int32 [tokens], the token behind each in its row; 0 where it is not known.
    slots: int32 [pieces], of each piece's row; the number of slots for padding.
    starts, counts: int32 [pieces], the position of each piece's first token, and its tokens.
    tables: int32 [pieces, columns], block tables of each group of layers: as many of their entries
        as hold all pages.
    encoded: int32 [pieces], tokens in encoded blocks already; see Span.
    drawn: int32 [pieces], new tokens of the row that were drawn before.
    is_first: bool [pieces], whether the slot begins with the piece.
    is_last: bool [pieces], whether the next token is drawn behind the piece.
    settings: of each piece's row.
    rotary_lengths: int32 [pieces], of each piece's row; None as in DecoderCache.
    adapters: int32 [pieces], as in DecoderCache; None where no row has one.
    masks: uint32 [pieces, 1, words], the tokens that may come behind each piece, for rows with a
        constraint; None for programs without processors.
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "entries", "pages", "adapters"],
    meta_fields=["columns"],
)
@dataclasses.dataclass(frozen=True)
class Stepping:
    """Rows to decode, as NumPy's arrays.

    slots: int32 [rows]; the number of slots for padding.
    entries: int32 [rows], the entry of each row's block tables that gets a page; beyond the tables
        for rows that get none. pages: int32 [rows], the page of each group of layers.
    columns: the entries of block tables that hold all pages of the rows (static).
    adapters: int32 [rows], as in DecoderCache; None where no row has one.
    """

    slots: Any
    entries: Any
    pages: Any
    columns: int
    adapters: Any = None

    def grown(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The block tables of all slots, with the rows' new pages."""
        return tuple(
            table.at[self.slots, self.entries].set(pages, mode="drop")
            for table, pages in zip(tables, self.pages, strict=True)
        )

    def read(self, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The entries of the rows' block tables that they read, [rows, columns]."""
        return tuple(
            table if table.shape[1] == self.columns else table[:, : self.columns]
            for table in tables
        )


@_arrays
class Drawn:
    """The tokens that a program has drawn.

    tokens, logprobs: int32 and float32 [rows, steps]. counts: int32 [rows], tokens of each row.
    running: bool [rows], whether more can be drawn.
    top_logprobs: the likeliest tokens in the place of each, and their log-probabilities, int32 and
        float32 [rows, steps, number]; None where all rows are greedy.
    speculated: how many tokens were proposed and accepted; None without speculation.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    running: Any
    top_logprobs: Any = None
    speculated: Speculated | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The four arrays."""
        return self.tokens, self.logprobs, self.counts, self.running


@_arrays
class PromptScores:
    """Scores behind each token that was read: of the next token of its row, and of the likeliest.

    logprobs: float32 [tokens], without meaning where the token behind is not known.
    top, top_logprobs: int32 and float32 [tokens, number], likeliest first; all but the first have
        no meaning where no row wants more.
    """

    logprobs: Any
    top: Any
    top_logprobs: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The three arrays."""
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
    """Reads pieces of prompts, and draws the next token of the rows whose last piece it is.

    greedy: whether all rows are known to take their likeliest tokens (static); see
        `RowSettings.likeliest`. scored: whether to compute log-probabilities of the prompts' tokens
        (static). width: the number of tokens to which each piece is padded, where no prefix is
        shared; None for varlen pieces (static).
    """
    slots, last = reading.slots, len(state.counts) - 1
    begun = _begun(state, reading, greedy=greedy)

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
    drawn = Drawn(draw.tokens, draw.logprobs, found.counts, after.running, draw.top_logprobs)
    return state, drawn, found.scores


def _read_padded(
    model: Decoder, reading: Reading, cache: DecoderCache, width: int, *, scored: bool
) -> Read:
    """Reads pieces of up to `width` tokens as rows of a padded batch."""
    counts, most = reading.counts, len(reading.tokens) - 1
    places = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(width)[None]
    tokens = reading.tokens[jnp.minimum(places, most)]
    logits, cache = model.step(tokens, counts, cache, every_position=scored)
    if not scored:
        return Read(logits, cache)
    found = tokens_of(counts, len(reading.tokens))
    return _scored(logits[found.sequence, found.number], cache, reading)


def _scored(logits: jax.Array, cache: DecoderCache, reading: Reading) -> Read:
    """The scores of what was read, and the logits behind each piece, of those behind each token."""
    top = top_logprobs(logits, reading.settings.top_logprobs, always=1)
    scores = PromptScores(logprobs(logits, reading.following), *top)
    return Read(logits[jnp.maximum(jnp.cumsum(reading.counts) - 1, 0)], cache, scores)


def _begun(state: State, reading: Reading, *, greedy: bool) -> State:
    """The state of the rows of a program that reads, before it."""
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
    """Writes block tables at slots; their entries behind the given ones are no pages."""
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
    """Draws up to `steps` tokens of some rows, in one loop on the device.

    steps: decoding steps (static). greedy: as for `extend` (static).
    waits: whether the loop ends when all rows have ended (static). XLA launches all steps of a loop
        of known length, and so the caller goes on while a GPU works. Another loop makes the host
        wait for the GPU in each step.
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
    """The begin of a loop that draws up to `columns` tokens of some rows.

    Returns also the state of all slots, whose block tables have the rows' new pages.
    """
    cache = dataclasses.replace(state.cache, tables=stepping.grown(state.cache.tables))
    state = dataclasses.replace(state, cache=cache)
    rows = state.rows(stepping.slots, greedy=greedy)
    own = {"tables": stepping.read(rows.cache.tables), "adapters": stepping.adapters}
    rows = dataclasses.replace(rows, cache=dataclasses.replace(rows.cache, **own))
    return state, Loop.begin(rows, columns, model.columns)


def drawn_of(end: Loop) -> Drawn:
    """The tokens that a loop has drawn."""
    return Drawn(end.tokens, end.logprobs, end.drawn, end.state.running, end.top_logprobs)


def clear(model: Decoder, state: State, pages: tuple[jax.Array, ...], slot: jax.Array) -> State:
    """Sets pages and what is kept for a slot to zero, in which a row may have left NaN.

    pages: int32 [any number] of each group of layers. slot: int32 scalar, too high for none.
    """
    return _with_layers(state, model.clear_states(state.cache.layers, pages, slot[None]))


def copy(model: Decoder, state: State, source: jax.Array, target: jax.Array) -> State:
    """Copies what recurrent layers keep for a row: from a slot to a snapshot, or back.

    source, target: int32 scalars, of which a target too high is none.
    """
    return _with_layers(state, model.copy_states(state.cache.layers, source, target))


def _with_layers(state: State, layers: tuple[Any, ...]) -> State:
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))
