from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mpjax.engine import filling
from mpjax.engine.planner import Decode, Piece
from mpjax.engine.row import Row
from mpjax.engine.state import default_settings
from mpjax.sampling.token_lists import NO_ID

pytestmark = pytest.mark.any_version


def row(number, slot, pages):
    settings = default_settings(1)
    settings.top_k[0] = 40 + number
    owner = SimpleNamespace(settings=SimpleNamespace(row=settings))
    tokens = [100 * number + i for i in range(8)]
    return Row(number, tokens, 7, 9, owner=owner, slot=slot, pages=pages)


def test_pieces_lie_one_after_another_and_padding_has_no_slot():
    pieces = [
        Piece(row(1, 2, [[5, 6], [3, 0]]), 4, 8, is_first=True, is_last=True),
        Piece(row(2, 0, [[7], [8]]), 0, 3, is_first=False, is_last=False),
    ]
    found = filling.reading(pieces, filling.Layout(4, 2), tokens=10, rows=3, entries=3)
    assert found.tokens.tolist() == [104, 105, 106, 107, 200, 201, 202, 0, 0, 0]
    assert found.following.tolist() == [105, 106, 107, 0, 201, 202, 203, 0, 0, 0]
    assert found.slots.tolist() == [2, 0, 4]
    assert (found.starts.tolist(), found.counts.tolist()) == ([4, 0, 0], [4, 3, 0])
    assert found.tables[0].tolist() == [[5, 6, 0], [7, 0, 0], [0, 0, 0]]
    assert found.tables[1].tolist() == [[3, 0, 0], [8, 0, 0], [0, 0, 0]]
    assert (found.encoded.tolist(), found.drawn.tolist()) == ([4, 0, 0], [1, 1, 0])
    assert found.is_first.tolist() == found.is_last.tolist() == [True, False, False]
    assert found.settings.top_k[:2].tolist() == [41, 42]
    assert (found.settings.stop_ids == NO_ID).all()


def test_a_history_is_padded():
    found = filling.history(row(1, 0, []), 10)
    assert (found.tolist(), found.dtype) == ([*range(100, 108), 0, 0], np.int32)


def test_rows_that_get_a_page_and_rows_that_get_none():
    plan = Decode([row(1, 3, [[1, 2]]), row(2, 0, [[4]])], 5, True, [(1, [2]), None])
    found = filling.stepping(plan, filling.Layout(6), rows=4, entries=8)
    assert found.slots.tolist() == [3, 0, 6, 6]
    assert found.entries.tolist() == [1, 8, 8, 8]
    assert found.pages[0][0] == 2
    assert all(x.dtype == np.int32 for x in jax.tree.leaves(found))
    assert found.columns == 8
    narrow = filling.stepping(plan, filling.Layout(6), rows=4, entries=8, columns=4)
    assert (narrow.entries.tolist(), narrow.columns) == (found.entries.tolist(), 4)
    tables = np.arange(48).reshape(6, 8)
    assert narrow.read((tables,))[0].tolist() == tables[:, :4].tolist()
