"""Fills the arguments of an engine's programs from plans, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.constraints.matcher import write_masks
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import Decode, Piece
from mpjax.engine.programs import Reading, Stepping
from mpjax.engine.row import Row
from mpjax.engine.sizes import MOST_STOP_IDS
from mpjax.engine.state import default_settings
from mpjax.engine.watching import Watching
from mpjax.generation.state import State


class Layout(NamedTuple):
    """The sizes that all program arguments of an engine share.

    slots: number of slots. groups: number of groups of layers, with a block table each. by_length:
    whether there are rotary lengths. stop_ids: the most stop ids of a row.
    """

    slots: int
    groups: int = 1
    by_length: bool = False
    stop_ids: int = MOST_STOP_IDS

    @classmethod
    def of(cls, state: State) -> Layout:
        """The layout of an engine's state."""
        cache, stop_ids = state.cache, state.settings.stop_ids.shape[1]
        by_length = cache.rotary_lengths is not None
        return cls(len(state.counts), len(cache.tables), by_length, stop_ids)


def reading(
    pieces: Sequence[Piece],
    layout: Layout,
    *,
    tokens: int,
    rows: int,
    entries: int,
    masks: Callable[[int, int], np.ndarray] | None = None,
) -> Reading:
    """The arguments of a prefill program.

    tokens, rows: the sizes to which tokens and pieces are padded. entries: width of a block table.
    masks: a function from (rows, positions) to masks that allow all tokens; None for programs
    without processors.
    """
    (ids, following), numbers = np.zeros((2, tokens), np.int32), np.zeros((5, rows), np.int32)
    starts, counts, encoded, drawn, lengths = numbers
    own, flags = np.full(rows, layout.slots, np.int32), np.zeros((2, rows), bool)
    tables = tuple(np.full((rows, entries), NOWHERE, np.int32) for _ in range(layout.groups))
    settings = default_settings(rows, layout.stop_ids)
    at = 0
    for index, piece in enumerate(pieces):
        row, count = piece.row, piece.end - piece.start
        assert row.slot is not None
        ids[at : at + count] = row.tokens[piece.start : piece.end]
        behind = [*row.tokens, *row.behind][piece.start + 1 : piece.end + 1]
        following[at : at + len(behind)] = behind
        at += count
        own[index], starts[index], counts[index] = row.slot, piece.start, count
        encoded[index] = piece.start if piece.is_first else 0
        drawn[index] = len(row.tokens) - row.prompt
        lengths[index] = row.rotary_length
        flags[:, index] = piece.is_first, piece.is_last
        for table, pages in zip(tables, row.pages, strict=True):
            table[index, : len(pages)] = pages
        for target, source in zip(
            jax.tree.leaves(settings), jax.tree.leaves(row.owner.settings.row), strict=True
        ):
            target[index] = source[0]
    is_first, is_last = flags
    read = [piece.row for piece in pieces]
    drawing = [piece.row if piece.is_last else None for piece in pieces]
    return Reading(
        *(ids, following, own, starts, counts, tables, encoded, drawn),
        is_first=is_first,
        is_last=is_last,
        settings=settings,
        rotary_lengths=lengths if layout.by_length else None,
        adapters=_adapters(read, rows),
        masks=None if masks is None else fill_masks(masks(rows, 1), drawing),
        watching=Watching.of([row.watched for row in read], rows),
    )


def _adapters(rows: Sequence[Row], size: int) -> Any:
    """The adapter index of each row, int32 [size], 0 for none; None if no row has an adapter."""
    places = [0 if row.adapter is None else row.adapter.place for row in rows]
    return np.array(places + [0] * (size - len(rows)), np.int32) if any(places) else None


def fill_masks(
    masks: np.ndarray, rows: Sequence[Row | None], drafts: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """Writes the masks of rows with a constraint into `masks`, uint32 [rows, positions, words].

    drafts: the proposed tokens of each row. Returns `masks`. Behind forced tokens, which matchers
    have not followed yet, are the masks of the last place.
    """
    jobs = []
    for index, row in enumerate(rows):
        if row is not None and (matcher := row.owner.settings.masker) is not None:
            if forced := row.forced_tokens:
                masks[index, 0] = matcher.masks(forced)[-1]
            else:
                jobs.append((matcher, [] if drafts is None else drafts[index], masks[index]))
    write_masks(jobs)
    return masks


def padded(pages: Sequence[Sequence[int]], entries: int) -> tuple[np.ndarray, ...]:
    """The pages of each group, int32 [entries], padded with NOWHERE."""
    found = tuple(np.full(entries, NOWHERE, np.int32) for _ in pages)
    for target, own in zip(found, pages, strict=True):
        target[: len(own)] = own
    return found


def history(row: Row, tokens: int) -> np.ndarray:
    """The tokens of a row, int32 [tokens], padded with 0."""
    found = np.zeros(tokens, np.int32)
    found[: len(row.tokens)] = row.tokens
    return found


def numbers(slot: int, read: int, count: int, tokens: np.ndarray) -> np.ndarray:
    """The argument `numbers` of `begin_control`."""
    return np.concatenate([np.array([slot, read, count], np.int32), tokens])


def stepping(
    plan: Decode, layout: Layout, *, rows: int, entries: int, columns: int | None = None
) -> Stepping:
    """The arguments of a decoding program; the sizes are as for `reading`.

    columns: the entries of block tables that hold all pages of the rows; None for all.
    """
    own = np.full(rows, layout.slots, np.int32)
    places = np.full(rows, entries, np.int32)
    pages = tuple(np.full(rows, NOWHERE, np.int32) for _ in range(layout.groups))
    for index, (row, new) in enumerate(zip(plan.rows, plan.entries, strict=True)):
        assert row.slot is not None
        own[index] = row.slot
        if new is not None:
            places[index], each = new
            for target, page in zip(pages, each, strict=True):
                target[index] = page
    columns = entries if columns is None else columns
    watching = Watching.of([row.watched for row in plan.rows], rows)
    return Stepping(own, places, pages, columns, _adapters(plan.rows, rows), watching)
