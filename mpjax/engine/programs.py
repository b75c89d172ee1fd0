"""The programs of an engine as pure functions: read pieces of prompts, decode, and clear pages.

`compiled` jits them, with few sizes of their arguments and the state donated.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mpjax.decoding_state import DecodingState, repeat, several
from mpjax.decoding_step import advance
from mpjax.engine.drawing import RowRule, candidates, draw, is_end, no_candidates
from mpjax.engine.histories import extend_histories
from mpjax.engine.pages import NOWHERE
from mpjax.engine.state import EngineState, RowSettings
from mpjax.kernels import KVPages, PagedKVCache
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models import Decoder
from mpjax.random_keys import row_keys
from mpjax.sampling import logprobs
from mpjax.speculation.proposer import Speculated

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
    tables: int32 [pieces, columns], block tables: as many of their entries as hold all pages.
    encoded: int32 [pieces], tokens in encoded blocks already; see Span.
    drawn: int32 [pieces], new tokens of the row that were drawn before.
    is_first: bool [pieces], whether the slot begins with the piece.
    is_last: bool [pieces], whether the next token is drawn behind the piece.
    settings: of each piece's row.
    rotary_lengths: int32 [pieces], of each piece's row; None as in EngineState.
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "entries", "pages"],
    meta_fields=["columns"],
)
@dataclasses.dataclass(frozen=True)
class Stepping:
    """Rows to decode, as NumPy's arrays.

    slots: int32 [rows]; the number of slots for padding.
    entries, pages: int32 [rows], the entry of each row's block table that gets a page, and the
        page. The entry is beyond the table for rows that get none.
    columns: the entries of block tables that hold all pages of the rows (static).
    """

    slots: Any
    entries: Any
    pages: Any
    columns: int

    def read(self, tables: jax.Array) -> jax.Array:
        """The entries of block tables that the rows read, [rows, columns]."""
        return tables if tables.shape[1] == self.columns else tables[:, : self.columns]


@_arrays
class Drawn:
    """The tokens that a program has drawn.

    tokens, logprobs: int32 and float32 [rows, steps]. counts: int32 [rows], tokens of each row.
    running: bool [rows], whether more can be drawn.
    candidates: the likeliest tokens beside each, and their log-probabilities, int32 and float32
        [rows, steps, number]; None where all rows are greedy.
    speculated: how many tokens were proposed and accepted; None without speculation.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    running: Any
    candidates: Any = None
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
    state: EngineState,
    reading: Reading,
    riders: Stepping | None = None,
    *,
    greedy: bool = False,
    scored: bool = False,
) -> tuple[EngineState, Drawn, PromptScores | None]:
    """Reads pieces of prompts, and draws the next token of the rows whose last piece it is.

    riders: rows that decode a token beside them; None for none, and where prompts are scored.
        `Drawn` has them behind all pieces.
    greedy: whether all rows are known to take their likeliest token, as `draw` says (static).
    scored: whether to compute log-probabilities of the prompts' tokens (static).
    """
    rows = _reading_rows(reading)
    if riders is not None:
        both = rows, _stepping_rows(state, riders)
        rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
    slots, last = rows.slots, len(state.lengths) - 1
    cache = view(state, rows.tables, rows.starts, jnp.minimum(slots, last), rows.rotary_lengths)
    encoded = None if state.format.block is None else reading.encoded
    seen = _see(state.seen, reading)
    tokens = reading.tokens
    if riders is not None:
        tokens = jnp.concatenate([tokens, state.newest[jnp.minimum(riders.slots, last)]])
    logits, cache = model.step_varlen(
        tokens,
        rows.counts,
        cache,
        encoded=encoded,
        every_position=scored,
        riders=len(tokens) - len(reading.tokens),
    )
    scores = None
    if scored:
        top = candidates(logits, reading.settings, 1)
        scores = PromptScores(logprobs(logits, reading.following), *top)
        logits = logits[jnp.maximum(jnp.cumsum(reading.counts) - 1, 0)]
    seen_by_rows = None if greedy else seen[jnp.minimum(slots, last)]
    drawn, chance, told = draw(
        logits, rows.settings, rows.drawn, seen_by_rows, divided=model.shards > 1
    )
    one = rows.draws.astype(jnp.int32)
    counts = rows.drawn + one
    running = rows.draws & ~is_end(drawn, chance, rows.settings, counts)
    drawing = jnp.where(rows.draws, slots, last + 1)
    state = dataclasses.replace(
        state,
        layers=cache.layers,
        tables=put(slots)(state.tables, _widened(rows.tables, state.tables.shape[1])),
        lengths=put(slots)(state.lengths, cache.lengths),
        newest=put(slots)(state.newest, drawn),
        counts=put(slots)(state.counts, counts),
        running=put(slots)(state.running, running),
        seen=seen.at[drawing, drawn].set(True, mode="drop"),
        settings=jax.tree.map(put(slots), state.settings, rows.settings),
        rotary_lengths=jax.tree.map(put(slots), state.rotary_lengths, rows.rotary_lengths),
        speculation=extend_histories(state.speculation, drawing, cache.lengths, drawn),
    )
    told = jax.tree.map(lambda x: x[:, None], told)
    return state, Drawn(drawn[:, None], chance[:, None], one, running, told), scores


@_arrays
class _Rows:
    """The rows of a program that reads: of pieces, and of riders.

    slots, starts, counts, tables, drawn, settings, rotary_lengths: as in Reading. draws: bool
    [rows], whether the next token is drawn.
    """

    slots: Any
    starts: Any
    counts: Any
    tables: Any
    drawn: Any
    draws: Any
    settings: RowSettings
    rotary_lengths: Any


def _reading_rows(reading: Reading) -> _Rows:
    return _Rows(
        *(reading.slots, reading.starts, reading.counts, reading.tables, reading.drawn),
        reading.is_last,
        reading.settings,
        reading.rotary_lengths,
    )


def _stepping_rows(state: EngineState, riders: Stepping) -> _Rows:
    """Rows that decode. Those that have ended, which their plan did not know, become padding."""
    last = len(state.lengths) - 1
    own = jnp.minimum(riders.slots, last)
    alive = state.running[own] & (riders.slots <= last)
    tables = state.tables.at[riders.slots, riders.entries].set(riders.pages, mode="drop")
    return _Rows(
        jnp.where(alive, riders.slots, last + 1),
        state.lengths[own],
        alive.astype(jnp.int32),
        riders.read(tables[own]),
        state.counts[own],
        alive,
        *jax.tree.map(lambda x: x[own], (state.settings, state.rotary_lengths)),
    )


def view(
    state: EngineState,
    tables: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    rotary_lengths: jax.Array | None,
) -> PagedKVCache:
    """The cache of some slots, each with a row of `tables`, `lengths` and `rotary_lengths`."""
    residual_pages = None if state.format.block is None else slots[:, None]
    return PagedKVCache(state.layers, tables, lengths, state.format, residual_pages, rotary_lengths)


def put(slots: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Writes the rows of an array at slots into another; rows of padding have no slot."""
    return lambda target, rows: target.at[slots].set(rows, mode="drop")


def _widened(tables: jax.Array, entries: int) -> jax.Array:
    """Block tables with so many entries, of which those behind the given ones are no pages."""
    missing = entries - tables.shape[1]
    return jnp.pad(tables, ((0, 0), (0, missing)), constant_values=NOWHERE) if missing else tables


def _see(seen: jax.Array, reading: Reading) -> jax.Array:
    """Marks the tokens that are read, in slots that are cleared where a row begins."""
    begun = jnp.where(reading.is_first, reading.slots, len(seen))
    seen = seen.at[begun].set(False, mode="drop")
    found = tokens_of(reading.counts, len(reading.tokens))
    slot = jnp.where(found.is_real, reading.slots[found.sequence], len(seen))
    return seen.at[slot, reading.tokens].set(True, mode="drop")


def decode(
    model: Decoder,
    state: EngineState,
    stepping: Stepping,
    *,
    steps: int,
    greedy: bool,
    waits: bool = False,
) -> tuple[EngineState, Drawn]:
    """Draws up to `steps` tokens of some rows, in one loop on the device.

    steps: decoding steps (static). greedy: as for `extend` (static).
    waits: whether the loop ends when all rows have ended (static). XLA launches all steps of a loop
        of known length, and so the caller goes on while a GPU works. Another loop makes the host
        wait for the GPU in each step.
    """
    loop, tables, settings = begin(state, stepping, steps, greedy=greedy)
    before = loop.counts

    def unfinished(loop: DecodingState) -> jax.Array:
        return (loop.step <= steps) & ~loop.finished.all()

    def go_on(loop: DecodingState) -> DecodingState:
        return advance(model, loop, RowRule(settings), ~loop.finished)

    if waits and steps > 1:
        end = repeat(go_on, unfinished, loop, stride=1)
    else:
        end = several(go_on, steps, loop)
    return settled(state, stepping.slots, tables, end, end.counts - before)


def begin(
    state: EngineState, stepping: Stepping, most: int, *, greedy: bool
) -> tuple[DecodingState, jax.Array, RowSettings]:
    """The begin of a loop that draws up to `most` tokens of some rows.

    Returns also the block tables of all slots, with the rows' new pages, and the rows' settings.
    """
    slots, drawn = stepping.slots, (len(stepping.slots), most + 1)
    own = jnp.minimum(slots, len(state.lengths) - 1)
    tables = state.tables.at[slots, stepping.entries].set(stepping.pages, mode="drop")
    settings, rotary_lengths = jax.tree.map(
        lambda x: x[own], (state.settings, state.rotary_lengths)
    )
    loop = DecodingState(
        cache=view(state, stepping.read(tables[own]), state.lengths[own], own, rotary_lengths),
        keys=row_keys(settings.key_words),
        tokens=jnp.zeros(drawn, jnp.int32).at[:, 0].set(state.newest[own]),
        logprobs=jnp.zeros(drawn, jnp.float32),
        counts=state.counts[own],
        finished=~state.running[own] | (slots >= len(state.lengths)),
        seen=None if greedy else state.seen[own],
        step=jnp.int32(1),
        candidates=None if greedy else no_candidates(drawn, state.seen.shape[1]),
    )
    return loop, tables, settings


def settled(
    state: EngineState, slots: jax.Array, tables: jax.Array, end: DecodingState, drawn: jax.Array
) -> tuple[EngineState, Drawn]:
    """The state of an engine after a loop that has decoded rows of some slots, and their tokens.

    tables: of all slots. end: of the loop; its first column is each row's newest token from before.
    drawn: int32 [rows], the number of each row's new tokens.
    """
    newest = jnp.take_along_axis(end.tokens, drawn[:, None], 1)[:, 0]
    counts = state.counts[jnp.minimum(slots, len(state.counts) - 1)] + drawn
    state = dataclasses.replace(
        state,
        layers=end.cache.layers,
        tables=tables,
        lengths=put(slots)(state.lengths, end.cache.lengths),
        newest=put(slots)(state.newest, newest),
        counts=put(slots)(state.counts, counts),
        running=put(slots)(state.running, ~end.finished),
        seen=state.seen if end.seen is None else put(slots)(state.seen, end.seen),
    )
    told = jax.tree.map(lambda x: x[:, 1:], end.candidates)
    return state, Drawn(end.tokens[:, 1:], end.logprobs[:, 1:], drawn, ~end.finished, told)


def clear(
    state: EngineState,
    pages: jax.Array,
    slot: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
) -> EngineState:
    """Sets pages and the residual of a slot to zero, in which a row may have left NaN.

    pages: int32 [any number]. slot: int32 scalar, too high for none. mesh: the devices among
        which the KV heads are divided (static).
    """
    run = _clear_layers
    if mesh is not None:
        divided, whole = PartitionSpec(*mesh.axis_names), PartitionSpec()
        run = jax.shard_map(
            _clear_layers,
            mesh=mesh,
            in_specs=(divided, whole, whole),
            out_specs=divided,
            check_vma=False,
        )
    return dataclasses.replace(state, layers=run(state.layers, pages, slot))


def _clear_layers(
    layers: tuple[KVPages, ...], pages: jax.Array, slot: jax.Array
) -> tuple[KVPages, ...]:
    def cleared(pages_of_layer: Any) -> Any:
        residual = pages_of_layer.residual
        if residual is not None:
            residual = dataclasses.replace(
                residual,
                keys=residual.keys.at[slot].set(0, mode="drop"),
                values=residual.values.at[slot].set(0, mode="drop"),
            )
        changed: dict[str, Any] = {"residual": residual}
        for name, codes in (
            ("keys", pages_of_layer.format.key_codes),
            ("values", pages_of_layer.format.value_codes),
        ):
            changed[name] = getattr(pages_of_layer, name).at[pages].set(0)
            if codes.keeps_scales:
                parameters = f"{name[:-1]}_parameters"
                changed[parameters] = getattr(pages_of_layer, parameters).at[pages].set(0)
        return dataclasses.replace(pages_of_layer, **changed)

    return tuple(map(cleared, layers))
