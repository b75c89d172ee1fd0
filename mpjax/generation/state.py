"""State: the arrays of a batch that each step takes and returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.models.state import DecoderCache
from mpjax.sampling.processors import Attachment
from mpjax.sampling.settings import RowSettings


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("cache", "newest", "counts", "running", "settings", "speculation", "processors")
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """The state of the rows of a batch, or of an engine's slots.

    cache: keys and values of all tokens but each row's newest.
    newest: int32 [rows], the last token drawn. counts: int32 [rows], new tokens drawn.
    running: bool [rows], whether the row has not ended. settings: sampling settings and stop
    conditions of the rows. speculation: a Speculation: the rows' tokens and the proposer's state;
    None without a proposer. processors: logits processors; empty if no row has any.
    """

    cache: DecoderCache
    newest: jax.Array
    counts: jax.Array
    running: jax.Array
    settings: RowSettings
    speculation: Any = None
    processors: Attachment = ()

    def rows(self, slots: jax.Array, *, greedy: bool) -> State:
        """The state of the rows in `slots`, int32 [rows], without their speculation.

        A slot out of range is padding, which doesn't run. greedy: whether all rows are known to be
        greedy (static); see `RowSettings.likeliest`.
        """
        own = jnp.minimum(slots, len(self.counts) - 1)
        settings = self.settings.rows(own)
        return State(
            cache=self.cache.rows(own),
            newest=self.newest[own],
            counts=self.counts[own],
            running=self.running[own] & (slots < len(self.counts)),
            settings=settings.likeliest if greedy else settings,
            processors=tuple(one.rows(own) for one in self.processors),
        )

    def with_rows(self, slots: jax.Array, rows: State) -> State:
        """The state after writing `rows` back to `slots`; padding has a slot out of range.

        Block tables, settings and processors stay; of processors only the memory is written.
        """
        put = row_writer(slots)
        return dataclasses.replace(
            self,
            cache=self.cache.with_rows(slots, rows.cache),
            newest=put(self.newest, rows.newest),
            counts=put(self.counts, rows.counts),
            running=put(self.running, rows.running),
            processors=tuple(
                one.put_memory(slots, new)
                for one, new in zip(self.processors, rows.processors, strict=True)
            ),
        )


def row_writer(slots: jax.Array) -> Callable[[Any, Any], Any]:
    """A function that writes rows into an array at `slots`; padding has a slot out of range."""
    return lambda target, rows: target.at[slots].set(rows, mode="drop")
