"""Decides which program an engine runs next: pure Python, without a device.

Plans are made one step ahead, before the results of the previous program are known. So lengths are
those after all planned programs; a row that has ended in the meantime adds nothing to the cache.
With speculation, lengths are upper bounds, which `Row.learn` corrects.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence

from mpjax.engine.pace import Pace, context_work, tokens_within, usual_gap
from mpjax.engine.pages import PageGroups
from mpjax.engine.row import Row
from mpjax.engine.sizes import LEAST_TOKENS, Sizes, middle_chunk
from mpjax.engine.snapshots import Prefix

PIECES = 64  # another prompt's piece is added only if 1/PIECES of a chunk is left for it
# When a row is admitted, up to 1/HEADROOM of the pages stays free for running rows that may grow.
HEADROOM = 16


@dataclasses.dataclass(frozen=True)
class Piece:
    """A prefill chunk of one row: its tokens from `start` to before `end`.

    is_first: whether it is the first chunk in the row's slot. is_last: whether the next token is
    drawn after it. snapshot: the place for a copy of the slot's recurrent states after it, or None.
    forced: the number of the row's forced tokens.
    """

    row: Row
    start: int
    end: int
    is_first: bool
    is_last: bool
    snapshot: int | None = None
    forced: int = 0

    @property
    def begins_forced(self) -> bool:
        """Whether it is the first chunk of forced tokens; it begins with the token before them."""
        return self.forced > 0 and self.start == len(self.row.tokens) - self.forced - 1


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decoding program of up to `steps` steps, which draws up to `most` tokens of each row.

    greedy: whether all rows are greedy.
    entries: for each row, the index in its block tables that gets a new page, and that page in each
        group; or None.
    """

    rows: list[Row]
    steps: int
    greedy: bool
    entries: list[tuple[int, list[int]] | None]
    most: int = 1


@dataclasses.dataclass(frozen=True)
class Extend:
    """A prefill program.

    scored: whether it computes the log-probabilities of prompts or forced tokens.
    """

    pieces: list[Piece]
    scored: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of all pieces."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def work(self) -> float:
        """The attention cost of all pieces, in tokens at position 0 (`pace.context_work`)."""
        return sum(context_work(piece.start, piece.end - piece.start) for piece in self.pieces)


class Planner:
    """The waiting and running rows of an engine; `plan` chooses the next program.

    Prefill and decoding alternate, unless max_gap is inf. While rows decode, prefill chunks are
    sized to end within `max_gap`; otherwise they are whole chunks.

    pace: predicts the seconds of programs; the caller reports measurements to it.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        snapshots = range(sizes.slots, sizes.slots + sizes.snapshots)
        self.groups = PageGroups(sizes.pages, sizes.windows, sizes.page_size, sizes.unit, snapshots)
        self.pace = Pace()
        self.waiting: list[Row] = []
        self.running: list[Row] = []  # sorted by `Row.order`
        self._slots = list(range(sizes.slots - 1, -1, -1))
        self._has_left = False  # whether the last program was a prefill
        self._waited = 0.0  # predicted seconds of prefill since the last decoding program
        self._has_more = False  # whether the last prefill program left tokens for the next
        self._left: list[tuple[int, list[list[int]]]] = []
        self._copies: list[tuple[int, int]] = []
        self._turns = 0  # decoding programs planned so far
        self.preemptions = 0
        self.version = 0  # of the weights; pages of other versions are not in the prefix cache
        self.held: list[Row] = []  # rows that wait for `release`
        self.prompt_tokens = 0  # of rows that got a slot
        self.shared_tokens = 0  # of them, found in the prefix cache

    def submit(self, row: Row) -> None:
        """Adds a waiting row; rows of equal priority run in order of arrival."""
        bisect.insort(self.waiting, row, key=lambda row: row.order)
        row.is_known = True

    def renew(self, version: int) -> None:
        """Notes new weights: pages and snapshots of older ones are no longer found."""
        self.version = version
        self.groups.forget()
        for row in self.running:
            self._drop_snapshots(row)
            row.stations = set()

    def put_back(self) -> None:
        """Preempts all running rows, which wait again; no program may be in flight."""
        for row in self.running[::-1]:
            self._leave(row, is_finite=True)
            self.submit(row)

    def hold(self) -> None:
        """Preempts all running rows; keeps all rows that have run from running until `release`."""
        self.put_back()
        begun = [row for row in self.waiting if row.runs]
        self.waiting = [row for row in self.waiting if not row.runs]
        self.held += begun

    def release(self) -> None:
        """Adds the held rows to the waiting ones."""
        held, self.held = self.held, []
        for row in held:
            self.submit(row)

    def why_never(self, prompt: int, most: int) -> str | None:
        """The reason why a request can never run, or None if it can."""
        reason = self.groups.why_never(prompt + most - 1)
        return reason and (
            f"{prompt} tokens and {most} new ones are too many, since {reason}: shorten the "
            "prompt, ask for fewer, or give the engine more cache_memory"
        )

    def remove(self, row: Row, *, is_finite: bool = True) -> None:
        """Removes a waiting or running row.

        is_finite: whether all of its cache entries are known to be finite, also those of programs
            whose results are not read yet.
        """
        if row in self.held:
            self.held.remove(row)
        elif row.slot is None:
            self._take_from_waiting(row)
        else:
            self._leave(row, is_finite=is_finite)

    def take_left(self) -> list[tuple[int, list[list[int]]]]:
        """Pops the slots, and the pages of each group, that may hold NaN.

        They must be cleared before the next program, whose rows may own them: a masked key or value
        is multiplied by zero, and 0 × NaN is NaN.
        """
        left, self._left = self._left, []
        return left

    def take_copies(self) -> list[tuple[int, int]]:
        """Pops pairs (snapshot, slot) of states to copy from a snapshot to a slot.

        They must be copied in this order before the next program, which may replace snapshots.
        """
        copies, self._copies = self._copies, []
        return copies

    def plan(self) -> Extend | Decode | None:
        """The next program; None if there is nothing to do until results are known."""
        if self._has_left and not self._may_read_on() and (decode := self._plan_decode()):
            self._has_left, self._waited = False, 0.0
            return decode
        if extend := self._plan_extend():
            self._has_left = True
            self._waited += self.pace.seconds(self._padded(extend), extend.work)
            return extend
        self._has_left, self._waited = False, 0.0
        return self._plan_decode()

    @property
    def is_settled(self) -> bool:
        """Whether the next plan can only decode: no row waits, and pages are left for all."""
        most = self.sizes.most_drawn(self.sizes.steps)
        needed = len(self.running) * self.sizes.pages_for(most + self.sizes.page_size)
        has_pages = all(pool.available >= needed for pool in self.groups.pools)
        return has_pages and not self.waiting and not any(row.is_reading for row in self.running)

    def learn(self, row: Row, tokens: Sequence[int], programs: int = 1) -> None:
        """Adds a row's new tokens, which the host has read and whose logits are finite.

        programs: the number of programs that have drawn them.

        Publishes pages whose content is final and finite in the prefix cache, and releases pages
        before the window.
        """
        row.learn(tokens, programs)
        if row.slot is not None:
            self._settle_pages(row)
            if row.has_to_reread:
                self._leave(row, is_finite=True)
                self.submit(row)

    def learn_piece(self, piece: Piece) -> None:
        """Notes that the logits after a piece are finite, and so all earlier keys and values."""
        row = piece.row
        row.certain = max(row.certain, piece.end)
        if (place := row.snapshots.pop(piece.end, None)) is not None:
            self.groups.snapshots.publish(place, self._key(row, piece.end))
        self._settle_pages(row)

    # -- prefill

    def _may_read_on(self) -> bool:
        """Whether decoding rows may wait for a further prefill program of middle size."""
        gap = self._gap(len(self._decoding()))
        if gap == math.inf:
            return True
        seconds = self.pace.seconds(middle_chunk(self.sizes.chunk), 0)
        return self._waited + seconds + self.pace.step_seconds <= gap

    def _padded(self, extend: Extend) -> int:
        """The compiled prefill size, in tokens, to which a program's tokens are padded."""
        greedy = all(piece.row.is_greedy for piece in extend.pieces)
        sizes = self.sizes.reading_sizes(greedy=greedy, scored=extend.scored)
        return next(size for size in sizes if size >= extend.tokens)

    def _plan_extend(self) -> Extend | None:
        pieces: list[Piece] = []
        self._has_more = False
        if not (rows := [*self._rows_to_read()]):
            return None
        first, (room, work) = rows[0], self._room(rows[0])
        least = max(1, room // PIECES)
        for row in rows:
            is_full = room < least or work <= 0 or len(pieces) == self.sizes.sequences
            is_other = pieces and (row.is_scored, row.kind) != (first.is_scored, first.kind)
            if pieces and (is_full or is_other):
                self._has_more = True
                break
            if row.slot is None and not self._admit(row):
                break
            count = self._count(row, room, work, LEAST_TOKENS if not pieces else 1)
            if not (count := self._with_pages(row, count, preempts=not pieces)):
                self._has_more = True
                break
            room, work = room - count, work - context_work(row.length, count)
            pieces.append(self._cut(row, count))
        self._has_more |= any(row.is_reading for row in self.running)
        return Extend(pieces, pieces[0].row.is_scored) if pieces else None

    def _room(self, first: Row) -> tuple[int, float]:
        """The most tokens of the next prefill program, and their most context work.

        first: the first row to prefill.
        """
        decoding = self._decoding()
        kind = {
            "greedy": all(row.is_greedy for row in [first, *decoding]),
            "scored": first.is_scored,
        }
        sizes = self.sizes.reading_sizes(**kind)
        gap = self._gap(len(decoding)) if decoding else math.inf
        left = gap if gap == math.inf else gap - self._waited
        return self.pace.choose(sizes, [*self._unread()], left)

    def _unread(self) -> Iterator[tuple[int, int]]:
        """(position, number) of the tokens to prefill, by row; some may be in the prefix cache."""
        for row in self.running:
            if row.is_reading:
                yield row.length, row.target - row.length
        for row in self.waiting[: min(len(self._slots), self.sizes.sequences)]:
            yield 0, len(row.tokens)

    def _gap(self, decoding: int) -> float:
        """The seconds that decoding rows may wait for prefill. decoding: number of these rows."""
        if (gap := self.sizes.max_gap) is not None:
            return gap
        reading = sum(row.is_reading for row in self.running)
        return usual_gap(reading + min(len(self.waiting), len(self._slots)), decoding)

    def _rows_to_read(self) -> Iterator[Row]:
        """Rows with tokens to prefill: first running, then waiting ones."""
        yield from [row for row in self.running if row.is_reading]
        yield from self.waiting[: self.sizes.sequences]

    def _count(self, row: Row, room: int, work: float, least: int) -> int:
        """The number of a row's tokens to prefill next.

        room: the most tokens. work: their most context work, which at least `least` tokens ignore.
        """
        count = min(row.target - row.length, room, self.sizes.width or room)
        if block := self.sizes.block:  # so that results don't depend on chunk sizes
            count = min(count, block - row.length % block)
        count = min(count, max(least, tokens_within(row.length, work)))
        ends = [end - row.length for end in row.stations if end > row.length]
        return min(count, *ends) if ends else count

    def _cut(self, row: Row, count: int) -> Piece:
        start = row.length
        row.length += count
        is_first, is_last = row.is_fresh, not row.is_reading
        row.is_fresh = False
        if is_last:
            row.draw(1, 1)
        place = self._take_snapshot(row)
        return Piece(row, start, start + count, is_first, is_last, place, row.forced)

    def _take_snapshot(self, row: Row) -> int | None:
        """The place for a snapshot of the row's states after a planned piece, or None."""
        snapshots = self.groups.snapshots
        if row.length not in row.stations or snapshots.has(self._key(row, row.length)):
            return None
        if (place := snapshots.take()) is not None:
            row.snapshots[row.length] = place
        return place

    def _key(self, row: Row, tokens: int) -> bytes:
        """The key of a row's page that ends after `tokens` tokens (whole pages)."""
        return row.page_keys(tokens // self.sizes.page_size, self.sizes.page_size)[-1]

    def _admit(self, row: Row) -> bool:
        """Gives a waiting row a slot, and pages for its prefill; False if it has to wait."""
        if not self._slots:
            return False
        row.set_rotary_length()
        shared = self._find_shared(row)
        growing = sum(map(self._can_grow, self.running))
        headroom = min(growing, min(self.sizes.pages, default=0) // HEADROOM)
        if (pages := self.groups.begin(shared.pages, len(row.tokens), headroom)) is None:
            return False
        self._take_from_waiting(row)
        bisect.insort(self.running, row, key=lambda row: row.order)
        row.slot, row.pages, row.target = self._slots.pop(), pages, len(row.tokens)
        row.length, row.drawn = shared.count * self.sizes.page_size, len(row.tokens) - row.prompt
        row.stations = self._stations(row, shared.known)
        if shared.snapshot is not None:
            self._copies.append((shared.snapshot, row.slot))
        row.certain, row.flights, row.version = row.length, [], self.version
        row.runs, row.is_fresh, row.published = row.runs + 1, True, shared.count
        row.turn = self._turns
        self.prompt_tokens += row.target
        self.shared_tokens += row.length
        if row.runs == 1:
            row.shared = row.length
        return True

    def _can_grow(self, row: Row) -> bool:
        """Whether a running row may need more pages before it ends."""
        most = self.sizes.pages_for(row.prompt + row.most - 1)
        return bool(row.pages) and len(row.pages[0]) < most

    def _take_from_waiting(self, row: Row) -> None:
        index = bisect.bisect_left(self.waiting, row.order, key=lambda row: row.order)
        assert self.waiting[index] is row
        del self.waiting[index]

    def _stations(self, row: Row, known: int) -> set[int]:
        """The numbers of tokens after which snapshots of the row's states are kept.

        These are the longest prefix that another row can share, and the prefix whose pages were
        found without a snapshot, where this row and earlier ones diverge. known: pages found.
        """
        if not (row.shares and self.groups.snapshots.count):
            return set()
        last = (len(row.tokens) - 1) // self.sizes.unit * self.sizes.unit
        return {last, known * self.sizes.page_size} - {0}

    def _find_shared(self, row: Row) -> Prefix:
        """The row's cached prefix, never with the row's last token, whose logits are needed."""
        pages = (len(row.tokens) - 1) // self.sizes.page_size if row.shares else 0
        return self.groups.find_prefix(row.page_keys(pages, self.sizes.page_size))

    def _with_pages(self, row: Row, count: int, *, preempts: bool) -> int:
        """How many of `count` tokens a row can prefill next; allocates their pages.

        preempts: whether to preempt rows for pages, unless pages will be released anyway.
        """
        if preempts and not any(row.certain < row.length for row in self.running):
            self._make_room(row, min(count, LEAST_TOKENS))
        if row.slot is None:
            return 0
        count = min(count, self.groups.room(row.pages) - row.length)
        if count <= 0 or not self.groups.grow(row.pages, row.length + count):
            return 0
        return count

    # -- decoding

    def _decoding(self) -> list[Row]:
        """The rows that can decode next."""
        return [row for row in self.running if row.can_draw]

    def _plan_decode(self) -> Decode | None:
        candidates = self._decoding()
        if candidates:  # those that can be in one program with the row that waits longest
            kind = min(candidates, key=lambda row: row.turn).kind
            candidates = [row for row in candidates if row.kind == kind]
        greedy = all(row.is_greedy for row in candidates)
        # A single step if other rows wait for prefill, if during the program a row could reach the
        # length after which it must be prefilled again, or if a row is constrained.
        waits = self._has_more
        most = self.sizes.most_drawn(self.sizes.steps)
        waits |= any(row.space < most or row.is_constrained for row in candidates)
        steps = 1 if waits else self.sizes.steps
        return self._step(candidates, steps, greedy, most=self.sizes.most_drawn(steps))

    def _step(
        self, candidates: Sequence[Row], steps: int, greedy: bool, *, most: int
    ) -> Decode | None:
        """A decoding program of the rows that get pages; None if no row does."""
        rows, entries, least = [], [], min(most, self.sizes.least_drawn(steps))
        self._turns += 1
        for row in candidates:
            if row.slot is None:
                continue  # preempted for an earlier row
            entry = len(row.pages[0]) if row.pages else 0
            if not self._make_room(row, row.growth(most)):
                continue
            rows.append(row)
            row.turn = self._turns
            new = [own[entry] for own in row.pages if entry < len(own)]
            assert len(new) in (0, len(row.pages))
            entries.append((entry, new) if new else None)
            row.draw(least, most)
        return Decode(rows, steps, greedy, entries, most) if rows else None

    def _make_room(self, row: Row, count: int) -> bool:
        """Gives a row pages for `count` more tokens; preempts the youngest rows if needed."""
        while not self.groups.grow(row.pages, row.length + count):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        return True

    def _preempt(self, row: Row) -> None:
        """Preempts a row: it waits, and its prompt and new tokens are prefilled again."""
        self._leave(row, is_finite=False)
        self.submit(row)
        self.preemptions += 1

    def _leave(self, row: Row, *, is_finite: bool) -> None:
        assert row.slot is not None
        row.take_forced()
        self.running.remove(row)
        self._slots.append(row.slot)
        self.groups.release(row.pages)
        if not is_finite:
            # Shared and published pages are finite: `_settle_pages` has published them.
            self._left.append((row.slot, self.groups.unowned(row.pages)))
        row.slot, row.pages, row.length, row.target, row.flights = None, [], 0, 0, []
        row.certain = 0
        self._drop_snapshots(row)

    # -- pages

    def _drop_snapshots(self, row: Row) -> None:
        for place in row.snapshots.values():
            self.groups.snapshots.drop(place)
        row.snapshots = {}

    def _settle_pages(self, row: Row) -> None:
        """Publishes a row's pages that are final and finite, and frees its pages before windows."""
        known = min(len(row.tokens) - 1, row.certain)
        if block := self.sizes.block:
            # A block is encoded when the first token after it is added.
            known = max(known - 1, 0) // block * block
        count = known // self.sizes.page_size if row.version == self.version else row.published
        if count != row.published:
            keys = row.page_keys(count, self.sizes.page_size)
            self.groups.publish(row.pages, row.published, keys)
            row.published = max(row.published, count)
        # Later programs have no query before this position.
        self.groups.free_before_window(row.pages, min(row.certain, row.length))
