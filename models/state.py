"""The states of a decoder's layers, the cache that contains them, and the context of a step.

A `StateSpec` describes the state of a layer's mixer. Only the mixer knows what is in it; decoder,
sharding and engine pass states on. Paged layers with equal windows share block tables.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from mpjax.kernels import Inbox, KVFormat, Span, StateRows
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.kv_cache.varlen import tokens_of

if TYPE_CHECKING:
    from mpjax.models.watch import Captured, Steer, Watch


@dataclasses.dataclass(frozen=True)
class Room:
    """The size of a layer's state.

    pages: of the layer's group. sequences: the most sequences with a state at once. format: of keys
    and values. page_size: tokens in a page. snapshots: room for copies of a sequence's fixed-size
    state.
    """

    pages: int
    sequences: int
    format: KVFormat
    page_size: int
    snapshots: int = 0


class StateSpec(Protocol):
    """The kind and size of a mixer's state: what it keeps of earlier tokens, such as their keys.

    is_paged: whether the state, or a part of it, is in pages of tokens, which block tables assign
        to sequences.
    keeps_sequences: whether the state, or a part of it, has a fixed size for each sequence. Then
        prefixes are shared only at snapshots of that state, and tokens can be removed only after
        a `tentative` step.
    window: the number of tokens that attend to a token, itself included; None: all later ones.
    """

    @property
    def is_paged(self) -> bool:
        """See StateSpec."""

    @property
    def keeps_sequences(self) -> bool:
        """See StateSpec."""

    @property
    def window(self) -> int | None:
        """See StateSpec."""

    def create(self, room: Room, scales: jax.Array | None) -> Any:
        """An empty state: a pytree of arrays whose first axis is divided among devices.

        scales: of the layer's cache, from a checkpoint or a calibration; None without.
        """

    def clear(self, state: Any, pages: jax.Array, slots: jax.Array) -> Any:
        """The state with zeros in some pages, and in the fixed-size states of some slots.

        pages, slots: int32 [any number]; indices out of range are ignored.
        """

    def forget(self, state: Any, before: Any) -> Any:
        """The state without the tokens since `before`.

        A fixed-size state is that of `before`. Paged states stay as they are, since later tokens
        overwrite their entries.
        """

    def copy(self, state: Any, source: jax.Array, target: jax.Array) -> Any:
        """The state with a sequence's fixed-size state copied from one index to another.

        source, target: int32 scalars below sequences + snapshots; a target out of range is ignored.
        """


@dataclasses.dataclass(frozen=True)
class SequenceState:
    """A state with a fixed size for each sequence: zeros before its first token.

    shapes: of each array, without the axis of sequences. dtype: of all arrays.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    is_paged: ClassVar[bool] = False
    window: ClassVar[None] = None

    @property
    def keeps_sequences(self) -> bool:
        """Whether there are any arrays: a layer without a mixer has none."""
        return bool(self.shapes)

    def create(self, room: Room, scales: jax.Array | None) -> tuple[jax.Array, ...]:
        """Zeros [sequences + snapshots, ...] of each shape. scales: unused."""
        places = room.sequences + room.snapshots
        return tuple(jnp.zeros((places, *shape), self.dtype) for shape in self.shapes)

    def clear(
        self, state: tuple[jax.Array, ...], pages: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The state with zeros for some sequences. pages: unused."""
        return tuple(array.at[slots].set(0, mode="drop") for array in state)

    def forget(
        self, state: tuple[jax.Array, ...], before: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """The state `before`."""
        return before

    def copy(
        self, state: tuple[jax.Array, ...], source: jax.Array, target: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The state with the entry at `source` copied to `target`."""
        return tuple(array.at[target].set(array[source], mode="drop") for array in state)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("layers", "tables", "lengths", "slots", "rotary_lengths", "adapters"),
        *("steer", "captured", "captured_at"),
    ],
    meta_fields=["format", "page_size"],
)
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """The states of a batch of sequences in all layers.

    layers: the state of each layer's mixer.
    tables: for each group of paged layers (`DecoderConfig.page_groups`), block tables int32
        [batch, pages per sequence]: entry p of a sequence is the page of its tokens from position
        p · page_size on.
    lengths: int32 [batch], the number of cached tokens of each sequence.
    format, page_size: of keys and values (static).
    slots: int32 [batch], the index of each sequence in fixed-size states; None if they are in the
        order of the batch.
    rotary_lengths: int32 [batch], the rotary length with which each sequence was prefilled, for
        models whose rotary frequencies depend on the length. None for other models.
    adapters: int32 [batch], the adapter of each sequence, on which its keys and values depend, as
        in StepContext; None if no sequence has one.
    steer: changes of activations, of type Steer. captured: activations [batch, positions, ...] by
        point and layer; None without captures. See `Keeper.watch`. captured_at: int32 [2, batch],
        the index of each sequence in `captured`, and the position of its first entry there; None if
        entries are in the order of the batch, from position 0.

    A cache is a value: functions take one and return the next. Donate it to `jit`, so that the next
    cache reuses its buffers.
    """

    layers: tuple[Any, ...]
    tables: tuple[jax.Array, ...]
    lengths: jax.Array
    format: KVFormat
    page_size: int
    slots: jax.Array | None = None
    rotary_lengths: jax.Array | None = None
    adapters: jax.Array | None = None
    steer: tuple[Steer, ...] = ()
    captured: Captured | None = None
    captured_at: jax.Array | None = None

    def rows(self, sequences: jax.Array) -> DecoderCache:
        """The cache of some sequences, int32 [rows]; `layers` are those of all sequences."""
        return dataclasses.replace(
            self,
            tables=tuple(table[sequences] for table in self.tables),
            lengths=self.lengths[sequences],
            slots=sequences if self.slots is None else self.slots[sequences],
            rotary_lengths=None if self.rotary_lengths is None else self.rotary_lengths[sequences],
            adapters=None if self.adapters is None else self.adapters[sequences],
        )

    def with_rows(self, sequences: jax.Array, rows: DecoderCache) -> DecoderCache:
        """The cache with some sequences replaced by `rows`, from `self.rows(sequences)` and steps.

        sequences: int32 [rows]; rows with an index out of range are ignored.
        """

        def put(target: jax.Array, new: jax.Array) -> jax.Array:
            return target.at[sequences].set(new, mode="drop")

        own = dataclasses.replace(self, layers=rows.layers, lengths=put(self.lengths, rows.lengths))
        if own.rotary_lengths is None or rows.rotary_lengths is None:
            return own
        lengths = put(own.rotary_lengths, rows.rotary_lengths)
        return dataclasses.replace(own, rotary_lengths=lengths)

    def begin(self, tokens: jax.Array) -> DecoderCache:
        """The cache with all lengths 0, before a prefill of int32 [batch] tokens per sequence."""
        lengths = None if self.rotary_lengths is None else tokens
        return dataclasses.replace(
            self, lengths=jnp.zeros(len(self.lengths), jnp.int32), rotary_lengths=lengths
        )

    @property
    def capacity(self) -> int:
        """The most tokens that each sequence can have."""
        entries = (table.shape[1] for table in self.tables)
        return min((count * self.page_size for count in entries), default=sys.maxsize)

    @property
    def nbytes(self) -> int:
        """The total bytes of all arrays, in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("angles", "starts", "counts", "tables", "slots", "encoded", "adapters"),
        *("layer_input", "routes", "inbox"),
    ],
    meta_fields=["fresh", "tentative", "watch", "keeps", "kv_format"],
)
@dataclasses.dataclass(frozen=True)
class StepContext:
    """Which tokens a step computes, for all layers and the linear maps in them.

    Tokens are [batch, tokens], of which the first counts[b] of row b are real and the others are
    padding. Or they are varlen, [tokens]: the sequences' tokens one after another.

    angles: of each token, by the kind of rotary embedding: float32 [..., head dim / 2].
    starts: int32 [batch], the position of each sequence's first token in the step. None without a
        cache, for whole sequences; then all later fields but counts are None.
    counts: int32 [batch], the number of each sequence's tokens.
    tables, slots: as in DecoderCache. encoded: as in Span. fresh: whether all starts are known to
        be 0 (static).
    adapters: int32 [batch], the index of each sequence's adapter, from 1; 0 for none. None if no
        sequence has one.
    tentative: whether tokens may be removed again, so that fixed-size states are not updated until
        `Decoder.settle` (static).
    watch: the step's captures and changes; None for none, and inside layers.
    layer_input: inside layers, the layer's input of each token, [..., size], with per-layer
        embeddings; else None.
    keeps: inside layers, whether attention without a cache returns keys and values as its state,
        since later layers read them (static).
    routes: given choices of routers, int32 [batch, tokens, k] by layer, or inside a layer its own;
        None: routers choose.
    kv_format: of the pages through which whole sequences attend, as those with a cache do; None:
        they attend to keys and values as they are (static).
    inbox: in a divided decoder, of this device, for the step's sums over devices; None: XLA sums.
    """

    angles: dict[str, jax.Array]
    starts: jax.Array | None = None
    counts: jax.Array | None = None
    tables: tuple[jax.Array, ...] = ()
    slots: jax.Array | None = None
    encoded: jax.Array | None = None
    fresh: bool = False
    adapters: jax.Array | None = None
    tentative: bool = False
    watch: Watch | None = None
    layer_input: jax.Array | None = None
    keeps: bool = False
    kv_format: KVFormat | None = None
    routes: Any = None
    inbox: Inbox | None = None

    @classmethod
    def of(
        cls,
        cache: DecoderCache,
        counts: jax.Array,
        angles: dict[str, jax.Array],
        *,
        encoded: jax.Array | None = None,
        fresh: bool = False,
    ) -> StepContext:
        """The context of new tokens that follow the cached ones."""
        places = cache.tables, cache.slots
        return cls(angles, cache.lengths, counts, *places, encoded, fresh, cache.adapters)

    @property
    def is_cached(self) -> bool:
        """Whether there is a cache. Without one, gradients may be needed, so nothing is rounded.

        In a batch-invariant context False, so that each product rounds the same input.
        """
        return self.starts is not None and not is_batch_invariant()

    def span(self, group: int, *, has_blocks: bool) -> Span:
        """The positions of the tokens in the pages of a group of layers.

        has_blocks: whether the KV format has blocks, whose incomplete tokens are kept by slot.
        """
        assert self.starts is not None
        assert self.counts is not None
        slots = self.slots if has_blocks else None
        return Span(
            self.tables[group],
            self.starts,
            self.counts,
            self.fresh,
            residual_pages=None if slots is None else slots[:, None],
            encoded=self.encoded if has_blocks else None,
        )

    def positions(self, shape: tuple[int, ...]) -> jax.Array:
        """The position of each token in its sequence, int32 of `shape`.

        shape: [batch, tokens], or [tokens] of varlen tokens.
        """
        if len(shape) == 2:
            starts = jnp.zeros(shape[:1], jnp.int32) if self.starts is None else self.starts
            return starts[:, None] + jnp.arange(shape[1])[None]
        assert self.starts is not None
        assert self.counts is not None
        found = tokens_of(self.counts, shape[0])
        return self.starts[found.sequence] + found.number

    def places(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """The sequence of each token, int32, and whether it is real, bool: both [all tokens].

        shape: [batch, tokens], or [tokens] of varlen tokens.
        """
        if len(shape) == 1:
            assert self.counts is not None
            found = tokens_of(self.counts, shape[0])
            return found.sequence, found.is_real
        batch, tokens = shape
        sequence = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tokens)
        if self.counts is None:
            return sequence, jnp.ones(batch * tokens, bool)
        return sequence, (jnp.arange(tokens)[None] < self.counts[:, None]).reshape(-1)

    def adapters_of(self, shape: tuple[int, ...]) -> jax.Array | None:
        """The adapter of each token, int32 of `shape`, or None if no sequence has one.

        shape: [batch, tokens], or [tokens] of varlen tokens.
        """
        if self.adapters is None:
            return None
        return self.adapters[self.places(shape)[0]].reshape(shape)

    @property
    def of_last(self) -> StepContext:
        """The context of only each sequence's last token, as in `last`, as varlen tokens."""
        if self.adapters is None:
            return self
        return dataclasses.replace(self, counts=jnp.ones_like(self.adapters))

    def rows(self, states: jax.Array) -> StateRows:
        """The indices of the step's sequences in an array [sequences, ...] of a SequenceState.

        A sequence without tokens in the step has no index; one at its first token begins with
        zeros, and so do all without a cache.
        """
        if self.starts is None:
            return StateRows(jnp.arange(len(states)), jnp.ones(len(states), bool))
        assert self.counts is not None
        slots = jnp.arange(len(self.counts)) if self.slots is None else self.slots
        return StateRows(jnp.where(self.counts > 0, slots, len(states)), self.starts == 0)

    def last(self, hidden: jax.Array) -> jax.Array:
        """The hidden state of each sequence's last token, [batch, hidden]."""
        assert self.counts is not None
        if hidden.ndim == 2:
            return hidden[jnp.maximum(jnp.cumsum(self.counts) - 1, 0)]
        if hidden.shape[1] == 1:
            return hidden[:, 0]
        last = jnp.maximum(self.counts - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


WHOLE = StepContext({})  # whole sequences, for modules that need no positions
