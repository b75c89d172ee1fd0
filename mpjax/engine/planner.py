"""Decides which program an engine runs next: pure Python, without a device.

A plan is made a step ahead, before the results of the last one are known. So lengths here are those
after all planned programs; a row that has ended in the meantime adds nothing to the cache. Where
tokens are proposed, a program draws as many as the model accepts: lengths are then the most that
they can be, and `Row.learn` corrects them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence

from mpjax.engine.pace import Pace, context_work, tokens_within, usual_gap
from mpjax.engine.pages import NOWHERE, PagePool
from mpjax.engine.row import Row
from mpjax.engine.sizes import LEAST_TOKENS, Sizes, middle_chunk, small_chunk

PIECES = 64  # no piece of another prompt begins where there is room for less of a chunk than this
WINDOW_SLACK = 256  # a tile of attention may begin before the window, by less than this
HEADROOM = 16  # one of so many pages, at most, stays free for rows that run when others come


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens of a row that a program reads, from `start` to before `end`.

    is_first: whether they are the first that the row's slot reads. is_last: whether the next token
    is drawn behind them.
    """

    row: Row
    start: int
    end: int
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Decode:
    """A program that decodes up to `steps` steps, and draws up to `most` tokens of each row.

    greedy: whether all of them are the likeliest ones.
    entries: for each row, the entry of its block table that gets a page, and the page; or None.
    """

    rows: list[Row]
    steps: int
    greedy: bool
    entries: list[tuple[int, int] | None]
    most: int = 1


NOBODY = Decode([], 1, False, [])  # riders of a program that has places for some


@dataclasses.dataclass(frozen=True)
class Extend:
    """A program that reads pieces of prompts.

    scored: whether with their log-probabilities. riders: rows that draw a token in the same
    program, or None.
    """

    pieces: list[Piece]
    scored: bool = False
    riders: Decode | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of all pieces."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def work(self) -> float:
        """The context work of all pieces; see `pace`."""
        return sum(context_work(piece.start, piece.end - piece.start) for piece in self.pieces)


class Planner:
    """Rows that wait and rows that run, and what to do next.

    Reading prompts and decoding take turns, unless rows may wait for ever. While rows decode,
    programs read as much as the seconds allow for which they may wait, and else whole chunks. Or
    rows that decode ride along: the program that reads draws one token for each. Small readings,
    and rows for which no page is free, take turns also then.

    pace: the seconds of programs, of which the caller tells it.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pool = PagePool(sizes.pages)
        self.pace = Pace()
        self.waiting: list[Row] = []
        self.running: list[Row] = []  # by order
        self._slots = list(range(sizes.slots - 1, -1, -1))
        self._has_left = False  # whether the last program let rows that decode wait
        self._waited = 0.0  # predicted seconds of programs that read, for which they have waited
        self._has_more = False  # whether the last reading program left pieces for the next one
        self._left: list[tuple[int, list[int]]] = []
        self.preemptions = 0
        self.prompt_tokens = 0  # of rows that were given a slot
        self.shared_tokens = 0  # of them, those in pages of other rows

    def submit(self, row: Row) -> None:
        """Adds a row that waits; rows of equal priority run in their order."""
        bisect.insort(self.waiting, row, key=lambda row: row.order)
        row.is_known = True

    def why_never(self, prompt: int, most: int) -> str | None:
        """The reason why a request can never run, or None if it can."""
        room = (self.sizes.pages - 1) * self.sizes.page_size
        if self.sizes.pages_for(prompt + most - 1) < self.sizes.pages:
            return None
        return (
            f"{prompt} tokens and {most} new ones don't fit in the cache, which holds {room}: "
            "shorten the prompt, ask for fewer, or give the engine more cache_memory"
        )

    def remove(self, row: Row, *, is_finite: bool = True) -> None:
        """Ends a row, wherever it is.

        is_finite: whether all that it has computed is known to be finite, also by programs whose
            results are not read yet.
        """
        if row.slot is None:
            self._take_from_waiting(row)
        else:
            self._leave(row, is_finite=is_finite)

    def take_left(self) -> list[tuple[int, list[int]]]:
        """Slots and pages that were left with numbers that may be NaN, each told once.

        They have to be cleared before the next program, whose rows may own them: masked reads
        multiply such numbers by zero, which gives NaN.
        """
        left, self._left = self._left, []
        return left

    def plan(self) -> Extend | Decode | None:
        """The next program, or None if there is nothing to do before results are known."""
        if self._has_left and not self._may_read_on() and (decode := self._plan_decode()):
            self._has_left, self._waited = False, 0.0
            return decode
        decoding = self._decoding()
        if extend := self._plan_extend():
            if self.sizes.rides and not extend.scored:
                extend = self._with_riders(extend, decoding)
            riders = extend.riders.rows if extend.riders else []
            self._has_left = len(riders) < len(decoding) or not self.sizes.rides
            if not self.sizes.rides:
                self._waited += self.pace.seconds(self._padded(extend), extend.work)
            return extend
        self._has_left, self._waited = False, 0.0
        return self._plan_decode()

    def learn(self, row: Row, tokens: Sequence[int]) -> None:
        """Adds new tokens that are known now, and that are of finite logits.

        Pages whose content is final and finite can be found by others from now on, and pages that
        no query sees again are given back.
        """
        row.learn(tokens)
        if row.slot is not None:
            self._publish(row)
            self._pass(row)
            if row.has_to_reread:
                self._leave(row, is_finite=True)
                self.submit(row)

    # -- reading prompts

    def _may_read_on(self) -> bool:
        """Whether rows that decode may wait for a program of middle size beside those before."""
        gap = self._gap(len(self._decoding()))
        if gap == math.inf:
            return True
        if self.sizes.rides:
            return False
        seconds = self.pace.seconds(middle_chunk(self.sizes.chunk), 0)
        return self._waited + seconds + self.pace.step_seconds <= gap

    def _padded(self, extend: Extend) -> int:
        """The size of a program that reads, without riders."""
        greedy = all(piece.row.is_greedy for piece in extend.pieces)
        sizes = self.sizes.reading_sizes(greedy=greedy, scored=extend.scored)
        return next(size for size in sizes if size >= extend.tokens)

    def _plan_extend(self) -> Extend | None:
        pieces: list[Piece] = []
        self._has_more = False
        rows = [*self._rows_to_read()]
        room, work = self._room(rows[0]) if rows else (0, 0.0)
        least = max(1, room // PIECES)
        for row in rows:
            is_full = room < least or work <= 0 or len(pieces) == self.sizes.sequences
            if pieces and (is_full or row.scored != pieces[0].row.scored):
                self._has_more = True
                break
            if row.slot is None and not self._admit(row):
                break
            count = self._count(row, room, work, LEAST_TOKENS if not pieces else 1)
            room, work = room - count, work - context_work(row.length, count)
            pieces.append(self._cut(row, count))
        self._has_more |= any(row.is_reading for row in self.running)
        return Extend(pieces, pieces[0].row.scored) if pieces else None

    def _room(self, first: Row) -> tuple[int, float]:
        """The most tokens that the next program reads, and the most context work of theirs.

        first: the row with the first tokens to read.
        """
        decoding = self._decoding()
        kind = {"greedy": all(row.is_greedy for row in [first, *decoding]), "scored": first.scored}
        sizes = self.sizes.reading_sizes(**kind)
        gap = self._gap(len(decoding)) if decoding else math.inf
        if self.sizes.rides and decoding and not first.scored:
            most = middle_chunk(self.sizes.chunk)
            if gap == math.inf:
                return most, math.inf
            sizes = sorted({*sizes, *self.sizes.reading_sizes(**kind, riders=True)})
            sizes = [size for size in sizes if size <= most]
        left = gap if gap == math.inf else gap - self._waited
        return self.pace.choose(sizes, [*self._unread()], left)

    def _unread(self) -> Iterator[tuple[int, int]]:
        """Positions and numbers of the tokens to read next, in order; some may be in the cache."""
        for row in self.running:
            if row.is_reading:
                yield row.length, row.target - row.length
        for row in self.waiting[: min(len(self._slots), self.sizes.sequences)]:
            yield 0, len(row.tokens)

    def _gap(self, decoding: int) -> float:
        """The seconds that rows which decode may wait for prompts. decoding: their number."""
        if (gap := self.sizes.max_gap) is not None:
            return gap
        reading = sum(row.is_reading for row in self.running)
        return usual_gap(reading + min(len(self.waiting), len(self._slots)), decoding)

    def _rows_to_read(self) -> Iterator[Row]:
        """Rows with tokens to read: first those that run, then those that wait."""
        yield from [row for row in self.running if row.is_reading]
        yield from self.waiting[: self.sizes.sequences]

    def _count(self, row: Row, room: int, work: float, least: int) -> int:
        """The number of a row's tokens to read next.

        room: the most tokens. work: the most context work of theirs, but for the `least` tokens.
        """
        count = min(row.target - row.length, room)
        if block := self.sizes.block:  # so that results don't depend on where pieces end
            count = min(count, block - row.length % block)
        return min(count, max(least, tokens_within(row.length, work)))

    def _cut(self, row: Row, count: int) -> Piece:
        start = row.length
        row.length += count
        is_first, is_last = row.is_fresh, not row.is_reading
        row.is_fresh = False
        if is_last:
            row.draw(1, 1)
        return Piece(row, start, start + count, is_first, is_last)

    def _admit(self, row: Row) -> bool:
        """Gives a waiting row a slot, and pages for all tokens to read; False if it has to wait."""
        if not self._slots:
            return False
        row.set_rotary_length()
        shared = self._find_shared(row)
        needed = self.sizes.pages_for(len(row.tokens)) - len(shared)
        headroom = min(len(self.running), self.sizes.pages // HEADROOM)
        if self.pool.available - self.pool.idle_of(shared) < needed + headroom:
            return False
        self.pool.share(shared)
        pages = self.pool.allocate(needed)
        assert pages is not None
        self._take_from_waiting(row)
        bisect.insort(self.running, row, key=lambda row: row.order)
        row.slot, row.pages, row.target = self._slots.pop(), shared + pages, len(row.tokens)
        row.length, row.drawn = len(shared) * self.sizes.page_size, len(row.tokens) - row.prompt
        row.flights = []
        row.runs, row.is_fresh, row.published = row.runs + 1, True, len(shared)
        self.prompt_tokens += row.target
        self.shared_tokens += row.length
        if row.runs == 1:
            row.shared = row.length
        return True

    def _take_from_waiting(self, row: Row) -> None:
        index = bisect.bisect_left(self.waiting, row.order, key=lambda row: row.order)
        assert self.waiting[index] is row
        del self.waiting[index]

    def _find_shared(self, row: Row) -> list[int]:
        """Pages of other rows that hold the row's first tokens; the last token is always read."""
        if not row.shares:
            return []
        of_unit = self.sizes.unit // self.sizes.page_size
        most = (len(row.tokens) - 1) // self.sizes.unit * of_unit
        found = self.pool.find(row.page_keys(most, self.sizes.page_size))
        return found[: len(found) // of_unit * of_unit]

    # -- decoding

    def _decoding(self) -> list[Row]:
        """The rows of which a token can be drawn next."""
        return [row for row in self.running if row.can_draw]

    def _plan_decode(self) -> Decode | None:
        candidates = self._decoding()
        greedy = all(row.is_greedy for row in candidates)
        # A single step where others wait for the next piece of their prompts, unless rows ride
        # along then, and where the next step depends on random numbers, whose program has one step.
        waits = self._has_more and not self.sizes.rides
        # A program does not go on behind the place where a row has to be read again.
        most = self.sizes.most_drawn(self.sizes.steps)
        waits |= any(row.space < most for row in candidates)
        steps = self.sizes.steps if greedy and not waits else 1
        return self._step(candidates, steps, greedy, most=self.sizes.most_drawn(steps))

    def _with_riders(self, extend: Extend, rows: Sequence[Row]) -> Extend:
        """The program with rows that ride along, unless it is small: then turns cost little."""
        greedy = all(row.is_greedy for row in [*rows, *(piece.row for piece in extend.pieces)])
        if greedy and extend.tokens <= small_chunk(self.sizes.chunk):
            return extend
        # No row is preempted here, since it might be one of which the program reads a piece.
        riders = self._step(rows, 1, greedy, most=1, preempts=False)
        return dataclasses.replace(extend, riders=riders)

    def _step(
        self,
        candidates: Sequence[Row],
        steps: int,
        greedy: bool,
        *,
        most: int,
        preempts: bool = True,
    ) -> Decode | None:
        """Steps of those rows for which there are pages; None without any."""
        rows, entries, least = [], [], min(most, self.sizes.least_drawn(steps))
        for row in candidates:
            if row.slot is None:
                continue  # it was preempted for one before it
            entry = len(row.pages)
            if not self._make_room(row, row.growth(most), preempts=preempts):
                continue
            rows.append(row)
            entries.append((entry, row.pages[entry]) if entry < len(row.pages) else None)
            row.draw(least, most)
        return Decode(rows, steps, greedy, entries, most) if rows else None

    def _make_room(self, row: Row, count: int, *, preempts: bool) -> bool:
        """Gives a row pages for `count` more tokens, if need be those of the youngest rows."""
        needed = self.sizes.pages_for(row.length + count) - len(row.pages)
        if needed <= 0:
            return True
        while (pages := self.pool.allocate(needed)) is None:
            if not preempts:
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        row.pages.extend(pages)
        return True

    def _preempt(self, row: Row) -> None:
        """Sends a row back to those that wait; what it has drawn is read again later."""
        self._leave(row, is_finite=False)
        self.submit(row)
        self.preemptions += 1

    def _leave(self, row: Row, *, is_finite: bool) -> None:
        assert row.slot is not None
        self.running.remove(row)
        self._slots.append(row.slot)
        self.pool.release(row.pages)
        if not is_finite:
            # Pages that others find or own are finite: `learn` has published them.
            own = [page for page in row.pages if page != NOWHERE and self.pool.is_free(page)]
            self._left.append((row.slot, own))
        row.slot, row.pages, row.length, row.target, row.flights = None, [], 0, 0, []

    # -- pages

    def _publish(self, row: Row) -> None:
        """Lets others find the row's pages that hold tokens before the newest one."""
        known = min(len(row.tokens) - 1, row.length)
        if block := self.sizes.block:
            # A block is encoded when the first token behind it comes.
            known = max(known - 1, 0) // block * block
        pages = known // self.sizes.page_size
        keys = row.page_keys(pages, self.sizes.page_size)
        for number in range(row.published, pages):
            self.pool.publish(row.pages[number], keys[number])
        row.published = max(row.published, pages)

    def _pass(self, row: Row) -> None:
        """Releases pages that lie before the windows of all later queries.

        While a prompt is read, its row keeps all pages, so that they are cleared if it is NaN.
        """
        if self.sizes.window is None:
            return
        # The next query is behind the tokens that are known, and maybe not behind planned ones.
        query = min(row.length, len(row.tokens))
        behind = max(query - self.sizes.window - WINDOW_SLACK, 0) // self.sizes.page_size
        for entry in range(behind - 1, -1, -1):
            if row.pages[entry] == NOWHERE:
                break
            self.pool.release([row.pages[entry]])
            row.pages[entry] = NOWHERE
