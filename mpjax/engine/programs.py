"""The compiled programs of an engine: read pieces of prompts, decode, and clear pages.

Each has few sizes, so that few programs are compiled, at their first use. The state is donated:
pages are written in place.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax.decoding import has_warpgroups
from mpjax.engine.drawing import draw, is_end
from mpjax.engine.planner import scored_chunk
from mpjax.engine.state import EngineState, RowSettings
from mpjax.kernels import PagedKVCache, device
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models import Decoder

Class = TypeVar("Class")
LEAST_TOKENS = 16  # readings of fewer tokens take as long
FEW_ROWS = 4  # decoding fewer rows takes as long, but for a single one


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
    tables: int32 [pieces, pages per sequence], block tables.
    encoded: int32 [pieces], tokens in encoded blocks already; see Span.
    drawn: int32 [pieces], new tokens of the row that were drawn before.
    is_first: bool [pieces], whether the slot begins with the piece.
    is_last: bool [pieces], whether the next token is drawn behind the piece.
    settings: of each piece's row.
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


@_arrays
class Stepping:
    """Rows to decode, as NumPy's arrays.

    slots: int32 [rows]; the number of slots for padding.
    entries, pages: int32 [rows], the entry of each row's block table that gets a page, and the
        page. The entry is beyond the table for rows that get none.
    steps: int32 scalar.
    """

    slots: Any
    entries: Any
    pages: Any
    steps: Any


@_arrays
class Drawn:
    """What a program has drawn.

    tokens, logprobs: int32 and float32 [rows, steps]. counts: int32 [rows], tokens of each row.
    running: bool [rows], whether more can be drawn.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    running: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The four arrays."""
        return self.tokens, self.logprobs, self.counts, self.running


@_arrays
class PromptScores:
    """Of each token that was read: the log-probability of the token behind it, and the likeliest.

    logprobs: float32 [tokens], without meaning where the token behind is not known.
    best, best_logprobs: int32 and float32 [tokens].
    """

    logprobs: Any
    best: Any
    best_logprobs: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The three arrays."""
        return self.logprobs, self.best, self.best_logprobs


def extend(
    model: Decoder, state: EngineState, reading: Reading, *, scored: bool = False
) -> tuple[EngineState, Drawn, PromptScores | None]:
    """Reads pieces of prompts, and draws the next token of the rows whose last piece it is.

    scored: whether to compute log-probabilities of the prompts' tokens (static).
    """
    slots, last = reading.slots, len(state.lengths) - 1
    settings = jax.tree.map(_put(slots), state.settings, reading.settings)
    cache = _view(state, reading.tables, reading.starts, jnp.minimum(slots, last))
    encoded = None if state.format.block is None else reading.encoded
    seen = _see(state.seen, reading)
    logits, cache = model.step_varlen(
        reading.tokens, reading.counts, cache, encoded=encoded, every_position=scored
    )
    scores = None
    if scored:
        scores = _score(logits, reading.following)
        logits = logits[jnp.maximum(jnp.cumsum(reading.counts) - 1, 0)]
    seen_by_rows = seen[jnp.minimum(slots, last)]
    drawn, chance = draw(logits, reading.settings, reading.drawn, seen_by_rows)
    counts = reading.drawn + reading.is_last.astype(jnp.int32)
    running = reading.is_last & ~is_end(drawn, chance, reading.settings, counts)
    state = dataclasses.replace(
        state,
        layers=cache.layers,
        tables=_put(slots)(state.tables, reading.tables),
        lengths=_put(slots)(state.lengths, cache.lengths),
        newest=_put(slots)(state.newest, drawn),
        counts=_put(slots)(state.counts, counts),
        running=_put(slots)(state.running, running),
        seen=seen.at[jnp.where(reading.is_last, slots, last + 1), drawn].set(True, mode="drop"),
        settings=settings,
    )
    one = reading.is_last.astype(jnp.int32)
    return state, Drawn(drawn[:, None], chance[:, None], one, running), scores


def _view(
    state: EngineState, tables: jax.Array, lengths: jax.Array, slots: jax.Array
) -> PagedKVCache:
    """The cache of some slots, each with a row of `tables` and of `lengths`."""
    residual_pages = None if state.format.block is None else slots[:, None]
    return PagedKVCache(state.layers, tables, lengths, state.format, residual_pages)


def _put(slots: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Writes the rows of an array at slots into another; rows of padding have no slot."""
    return lambda target, rows: target.at[slots].set(rows, mode="drop")


def _see(seen: jax.Array, reading: Reading) -> jax.Array:
    """Marks the tokens that are read, in slots that are cleared where a row begins."""
    begun = jnp.where(reading.is_first, reading.slots, len(seen))
    seen = seen.at[begun].set(False, mode="drop")
    found = tokens_of(reading.counts, len(reading.tokens))
    slot = jnp.where(found.is_real, reading.slots[found.sequence], len(seen))
    return seen.at[slot, reading.tokens].set(True, mode="drop")


def _score(logits: jax.Array, following: jax.Array) -> PromptScores:
    """Scores of the tokens read. logits: float32 [tokens, vocabulary], after each token."""
    total = jax.nn.logsumexp(logits, axis=-1)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def chance(ids: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0] - total

    return PromptScores(chance(following), best, chance(best))


def decode(
    model: Decoder,
    state: EngineState,
    stepping: Stepping,
    *,
    room: int,
    stride: int,
    greedy: bool,
) -> tuple[EngineState, Drawn]:
    """Draws up to `steps` tokens of some rows, in one `while_loop`.

    room: the most steps (static). stride: decoding steps between two checks whether to go on, of
        which the steps are a multiple (static).
    greedy: whether all rows are known to take their likeliest token, without a repetition penalty
        and a least number of tokens (static).
    """
    slots, rows = stepping.slots, len(stepping.slots)
    own = jnp.minimum(slots, len(state.lengths) - 1)
    tables = state.tables.at[slots, stepping.entries].set(stepping.pages, mode="drop")
    settings = jax.tree.map(lambda x: x[own], state.settings)
    begun = _Loop(
        cache=_view(state, tables[own], state.lengths[own], own),
        newest=state.newest[own],
        counts=state.counts[own],
        alive=state.running[own] & (slots < len(state.lengths)),
        seen=state.seen,
        tokens=jnp.zeros((rows, room), jnp.int32),
        logprobs=jnp.zeros((rows, room), jnp.float32),
        drawn=jnp.zeros(rows, jnp.int32),
        step=jnp.int32(0),
    )

    def unfinished(loop: _Loop) -> jax.Array:
        return (loop.step < stepping.steps) & loop.alive.any()

    def advance(_: int, loop: _Loop) -> _Loop:
        alive = loop.alive
        logits, cache = model.step(loop.newest[:, None], alive.astype(jnp.int32), loop.cache)
        seen = None if greedy else loop.seen[own]
        token, chance = draw(logits, settings, loop.counts, seen)
        counts = loop.counts + alive.astype(jnp.int32)
        seen = loop.seen
        if not greedy:
            seen = seen.at[jnp.where(alive, slots, len(seen)), token].set(True, mode="drop")

        def record(target: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(alive, new, jnp.zeros_like(new))[:, None]
            return jax.lax.dynamic_update_slice_in_dim(target, new, loop.step, axis=1)

        return _Loop(
            cache=cache,
            newest=jnp.where(alive, token, loop.newest),
            counts=counts,
            alive=alive & ~is_end(token, chance, settings, counts),
            seen=seen,
            tokens=record(loop.tokens, token),
            logprobs=record(loop.logprobs, chance),
            drawn=loop.drawn + alive.astype(jnp.int32),
            step=loop.step + 1,
        )

    def advance_all(loop: _Loop) -> _Loop:
        # XLA launches all steps of a loop of known length without waiting for the GPU.
        return jax.lax.fori_loop(0, stride, advance, loop) if stride > 1 else advance(0, loop)

    end = jax.lax.while_loop(unfinished, advance_all, begun)
    state = dataclasses.replace(
        state,
        layers=end.cache.layers,
        tables=tables,
        lengths=_put(slots)(state.lengths, end.cache.lengths),
        newest=_put(slots)(state.newest, end.newest),
        counts=_put(slots)(state.counts, end.counts),
        running=_put(slots)(state.running, end.alive),
        seen=end.seen,
    )
    return state, Drawn(end.tokens, end.logprobs, end.drawn, end.alive)


@_arrays
class _Loop:
    """The carry of `decode`'s loop: numbers of rows, the cache, and what has been drawn."""

    cache: PagedKVCache
    newest: Any
    counts: Any
    alive: Any
    seen: Any
    tokens: Any
    logprobs: Any
    drawn: Any
    step: Any


def clear(state: EngineState, pages: jax.Array, slot: jax.Array) -> EngineState:
    """Sets pages and the residual of a slot to zero, which a row of NaN has left.

    pages: int32 [any number]. slot: int32 scalar.
    """

    def cleared(pages_of_layer: Any) -> Any:
        residual = pages_of_layer.residual
        if residual is not None:
            residual = dataclasses.replace(
                residual,
                keys=residual.keys.at[slot].set(0),
                values=residual.values.at[slot].set(0),
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

    return dataclasses.replace(state, layers=tuple(map(cleared, state.layers)))


class _Structure:
    """The structure of a model's pytree, which is compared quickly with itself."""

    def __init__(self, structure: Any) -> None:
        self.structure, self._hash = structure, hash(structure)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash and bool(self.structure == other.structure)
        )

    def __hash__(self) -> int:
        return self._hash


def _jit(function: Callable[..., Any], *, in_turn: bool) -> Any:
    """A program as a jitted function of a model's structure and arrays.

    in_turn: whether each kernel waits for the end of the one before (`decode_program`).
    """

    def run(structure: _Structure, leaves: list[jax.Array], *rest: Any, **how: Any) -> Any:
        return function(jax.tree.unflatten(structure.structure, leaves), *rest, **how)

    run.__name__ = run.__qualname__ = function.__name__
    return jax.jit(
        run,
        static_argnums=0,
        static_argnames=("scored", "room", "stride", "greedy"),
        donate_argnums=2,
        compiler_options={"xla_gpu_enable_pdl": False} if in_turn else None,
    )


# Engines over models of one structure, with equal sizes, share what is compiled.
_JITTED = {
    (function, in_turn): _jit(function, in_turn=in_turn)
    for function in (extend, decode)
    for in_turn in (False, True)
}
_jit_clear = jax.jit(clear, donate_argnums=0)


def compiled() -> int:
    """The number of programs that were compiled so far, of all engines."""
    return sum(function._cache_size() for function in (*_JITTED.values(), _jit_clear))


class Programs:
    """The jitted programs of one model, with the sizes to which their arguments are padded.

    chunk: the most tokens of a Reading. slots: of the state. steps: the most of a Stepping.

    Reading has three sizes; decoding seven where all rows are greedy and steps are whole strides,
    and three otherwise. With scores and clearing that makes 15 programs at most.
    """

    def __init__(self, model: Decoder, *, chunk: int, slots: int, steps: int) -> None:
        self.room = steps
        self.stride = steps if device.on_gpu() else 1
        parts = [chunk, chunk // 4, chunk // 16]
        self.reading_sizes = sorted({chunk, *(size for size in parts if size >= LEAST_TOKENS)})
        self.scored_size = scored_chunk(chunk)
        parts = [-(-slots // divisor) for divisor in (1, 2, 4, 8, 16)]
        few = {1, min(FEW_ROWS, slots)}
        self.greedy_sizes = sorted({slots, *few, *(size for size in parts if size > FEW_ROWS)})
        few = {min(2 * FEW_ROWS, slots), slots}
        self.other_sizes = sorted({*few, *(size for size in parts[2:3] if size > 2 * FEW_ROWS)})
        self.used: set[tuple[Any, ...]] = set()  # what tells compiled programs apart
        # A model has many modules. Its arrays alone are quickly passed to a program.
        self._leaves, structure = jax.tree.flatten(model)
        self._structure = _Structure(structure)
        self._is_in_turn = functools.cache(functools.partial(has_warpgroups, model))

    def extend(
        self, state: EngineState, reading: Reading, *, scored: bool
    ) -> tuple[EngineState, Drawn, PromptScores | None]:
        """Runs `extend`; the state is donated."""
        tokens = len(reading.tokens)
        self.used.add((extend, tokens, scored))
        run = _JITTED[extend, self._is_in_turn(tokens)]
        return run(self._structure, self._leaves, state, reading, scored=scored)

    def decode(
        self, state: EngineState, stepping: Stepping, *, greedy: bool
    ) -> tuple[EngineState, Drawn]:
        """Runs `decode`; the state is donated."""
        rows = len(stepping.slots)
        self.used.add((decode, rows, greedy))
        stride = self.stride if greedy else 1
        options = {"room": self.room, "stride": stride, "greedy": greedy}
        run = _JITTED[decode, self._is_in_turn(rows)]
        return run(self._structure, self._leaves, state, stepping, **options)

    def clear(self, state: EngineState, pages: Any, slot: Any) -> EngineState:
        """Runs `clear`; the state is donated."""
        self.used.add((clear,))
        return _jit_clear(state, pages, slot)

    def decoding_size(self, rows: int, steps: int, *, greedy: bool) -> tuple[int, bool]:
        """The number of rows to which rows are padded, and whether the greedy program serves."""
        greedy = greedy and steps % self.stride == 0
        sizes = self.greedy_sizes if greedy else self.other_sizes
        return next(size for size in sizes if size >= rows), greedy
