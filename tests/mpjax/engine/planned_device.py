"""A device of a few lines of Python beside a planner, which remembers what its pages hold."""

from __future__ import annotations

import itertools

from mpjax.engine import pages as pages_module
from mpjax.engine.pages import NOWHERE, page_key
from mpjax.engine.planner import Extend, Planner
from mpjax.engine.row import Row
from tests.mpjax.engine.conftest import require_order


def places(pages):
    """The group and number of each page of some, by groups."""
    return {(group, page) for group, own in enumerate(pages) for page in own if page != NOWHERE}


class Device:
    """Runs plans a step late, and remembers for each page which tokens of which text it holds."""

    def __init__(self, sizes, ends=()):
        self.planner, self.sizes, self.ends = Planner(sizes), sizes, dict(ends)
        self.planner.pace.learn_step(0.1)
        self.content: dict[tuple[int, int, int], tuple] = {}  # by group, page and place in it
        self.lengths: dict[Row, int] = {}
        self.pending: list = []
        self.finished: list[Row] = []
        self.order: list[Row] = []
        self.residuals: dict[tuple[int, int], tuple] = {}  # of slots: whose, and what
        self.published: set[tuple[int, int, bytes]] = set()  # pages with keys that were looked at
        self.uncertain: set[tuple[int, int, int]] = set()  # written by rows that left early

    def text(self, row):
        """All tokens that the row would say; those of rows that `ends` names end earlier."""
        return row.tokens[: row.prompt] + [1000 * row.number + i for i in range(row.most)]

    def most(self, row):
        return min(row.most, self.ends.get(row.number, row.most))

    def write(self, row, start, end):
        text = self.text(row)
        for position in range(start, end):
            found = tuple(text[: position + 1])
            if (block := self.sizes.block) is None:
                self.store(row, position, found)
                continue
            if position % block == 0:  # the first token behind a block has it encoded
                for before in range(max(0, position - block), position):
                    owner, content = self.residuals.get((row.slot, before % block), (None, ()))
                    if owner == (row, row.runs, before):
                        self.store(row, before, content)
            self.residuals[row.slot, position % block] = (row, row.runs, position), found

    def store(self, row, position, found):
        for group, pages in enumerate(row.pages):
            page = pages[position // self.sizes.page_size]
            assert page != NOWHERE
            self.content[group, page, position % self.sizes.page_size] = found

    def load(self, row, group, position, end):
        """What a row of `end` tokens reads at a position."""
        block = self.sizes.block
        if block is not None and position >= (end - 1) // block * block:
            return self.residuals[row.slot, position % block][1]
        page = row.pages[group][position // self.sizes.page_size]
        return self.content[group, page, position % self.sizes.page_size]

    def require_content(self, row, start, end):
        """The queries from `start` on read what the row wrote, or another with the same text."""
        text = self.text(row)
        for group, window in enumerate(self.sizes.windows):
            begin = 0 if window is None else max(0, start + 1 - window)
            for position in range(begin, end):
                assert self.load(row, group, position, end) == tuple(text[: position + 1])
            tile = max(0, begin - pages_module.WINDOW_SLACK) // self.sizes.page_size
            assert NOWHERE not in row.pages[group][tile : end // self.sizes.page_size]

    def run(self, plan):
        self.clear()
        if isinstance(plan, Extend):
            assert 0 < len(plan.pieces) <= self.sizes.sequences
            assert sum(piece.end - piece.start for piece in plan.pieces) <= self.sizes.chunk
            assert len({piece.row for piece in plan.pieces}) == len(plan.pieces)
            results = []
            for piece in plan.pieces:
                self.write(piece.row, piece.start, piece.end)
                self.require_content(piece.row, piece.start, piece.end)
                if block := self.sizes.block:
                    assert piece.start // block == (piece.end - 1) // block
                drawn = len(piece.row.tokens) - piece.row.prompt
                results.append((piece.row, piece.row.runs, drawn, int(piece.is_last), piece))
                if piece.is_last:
                    assert piece.end == piece.row.prompt + drawn
                    self.lengths[piece.row] = piece.end
            return results
        return self.decode(plan)

    def decode(self, plan):
        assert len(plan.rows) == len(set(plan.rows)) > 0
        results = []
        for row, new in zip(plan.rows, plan.entries, strict=True):
            length = self.lengths[row]
            drawn = length - row.prompt + 1
            most = row.most - drawn
            count = min(self.accepted(plan, drawn), self.most(row) - drawn)
            if count <= 0:
                results.append((row, row.runs, drawn, 0, None))
                continue
            if new is not None:
                entry, pages = new
                assert [own[entry:] for own in row.pages] == [[page] for page in pages]
            # What is proposed and refused is written as well, but never encoded.
            written = count if self.sizes.block else min(plan.most, most)
            self.write(row, length, length + written)
            self.require_content(row, length, length + count)
            self.lengths[row] = length + count
            results.append((row, row.runs, drawn, count, None))
        return results

    def accepted(self, plan, drawn):
        """The tokens that a program draws of a row that goes on."""
        if plan.most == plan.steps:
            return plan.steps
        return 1 + (7 * drawn + plan.steps) % plan.most

    def clear(self):
        for _, pages in self.planner.take_left():
            for place in [it for it in self.content if it[1] in pages[it[0]]]:
                del self.content[place]
                self.uncertain.discard(place)

    def read(self, results):
        for row, runs, drawn, count, piece in results:
            if row.slot is None or row.runs != runs:
                continue
            if piece is not None:
                self.planner.learn_piece(piece)
            if piece is not None and not piece.is_last:
                continue
            new = self.text(row)[row.prompt + drawn :][:count]
            assert len(row.tokens) == row.prompt + drawn
            self.planner.learn(row, new)
            if drawn + count >= self.most(row):
                self.planner.remove(row)
                self.finished.append(row)

    def step(self):
        plan = self.planner.plan()
        if isinstance(plan, Extend):
            self.planner.pace.learn_reading(plan.tokens, plan.work, 0.001 * plan.tokens)
        results = None if plan is None else self.run(plan)
        if plan is not None:
            for row in getattr(plan, "rows", None) or [piece.row for piece in plan.pieces]:
                if row not in self.order:
                    self.order.append(row)
        before, self.pending = self.pending, results or []
        self.read(before)
        require_order(self.planner)
        self.require_clear()
        self.require_published()
        return plan

    def require_published(self):
        """Pages that can be found hold the tokens that their key is of."""
        size, pools = self.sizes.page_size, self.planner.groups.pools
        found = {(g, *item) for g, pool in enumerate(pools) for item in pool._keys.items()}
        for group, page, key in found - self.published:
            self.published.add((group, page, key))
            text, expected = self.content[group, page, size - 1], b""
            assert [self.content[group, page, i] for i in range(size)] == [
                text[: len(text) - size + 1 + i] for i in range(size)
            ]
            for at in range(0, len(text), size):
                expected = page_key(expected, text[at : at + size])
            assert key == expected

    def require_clear(self):
        """No row owns what another has left that may be NaN, but before the next program."""
        told = {it for _, pages in self.planner._left for it in places(pages)}
        held = {it for row in self.planner.running for it in places(row.pages)}
        assert not {(group, page) for group, page, _ in self.uncertain} & (held - told)

    def leave(self, row):
        """Cancels a row, which may have written NaN to pages that nobody else finds."""
        pages = [list(own) for own in row.pages]
        self.planner.remove(row, is_finite=False)
        free = places(self.planner.groups.unowned(pages)) if pages else set()
        self.uncertain |= {place for place in self.content if place[:2] in free}

    def finish(self):
        for number in itertools.count():
            plan = self.step()
            planner = self.planner
            if plan is None and not (self.pending or planner.running or planner.waiting):
                return
            assert number < 2000, "the planner makes no progress"
