"""Fills the arguments of an engine's programs from plans, as NumPy's arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import Decode, Piece
from mpjax.engine.programs import Reading, Stepping
from mpjax.engine.row import Row
from mpjax.engine.state import RowSettings


def reading(
    pieces: Sequence[Piece],
    *,
    tokens: int,
    rows: int,
    slots: int,
    entries: int,
    by_length: bool = False,
) -> Reading:
    """The arguments that read pieces.

    tokens, rows: the sizes to which tokens and pieces are padded. slots: their number.
    entries: of a block table. by_length: whether there are rotary lengths.
    """
    (ids, following), numbers = np.zeros((2, tokens), np.int32), np.zeros((5, rows), np.int32)
    starts, counts, encoded, drawn, lengths = numbers
    own, flags = np.full(rows, slots, np.int32), np.zeros((2, rows), bool)
    tables, settings = np.full((rows, entries), NOWHERE, np.int32), RowSettings.usual(rows)
    at = 0
    for index, piece in enumerate(pieces):
        row, count = piece.row, piece.end - piece.start
        assert row.slot is not None
        ids[at : at + count] = row.tokens[piece.start : piece.end]
        behind = row.tokens[piece.start + 1 : piece.end + 1]
        following[at : at + len(behind)] = behind
        at += count
        own[index], starts[index], counts[index] = row.slot, piece.start, count
        encoded[index] = piece.start if piece.is_first else 0
        drawn[index] = len(row.tokens) - row.prompt
        lengths[index] = row.rotary_length
        flags[:, index] = piece.is_first, piece.is_last
        tables[index, : len(row.pages)] = row.pages
        for target, source in zip(
            jax.tree.leaves(settings), jax.tree.leaves(row.owner.settings.row), strict=True
        ):
            target[index] = source[0]
    is_first, is_last = flags
    return Reading(
        *(ids, following, own, starts, counts, tables, encoded, drawn),
        is_first=is_first,
        is_last=is_last,
        settings=settings,
        rotary_lengths=lengths if by_length else None,
    )


def history(row: Row, tokens: int) -> np.ndarray:
    """The tokens of a row, int32, padded to so many."""
    found = np.zeros(tokens, np.int32)
    found[: len(row.tokens)] = row.tokens
    return found


def stepping(
    plan: Decode, *, rows: int, slots: int, entries: int, columns: int | None = None
) -> Stepping:
    """The arguments that decode; the sizes are as for `reading`.

    columns: the entries of block tables that hold all pages of the rows; None for all.
    """
    own = np.full(rows, slots, np.int32)
    places, pages = np.full(rows, entries, np.int32), np.full(rows, NOWHERE, np.int32)
    for index, (row, new) in enumerate(zip(plan.rows, plan.entries, strict=True)):
        assert row.slot is not None
        own[index] = row.slot
        if new is not None:
            places[index], pages[index] = new
    return Stepping(own, places, pages, entries if columns is None else columns)
