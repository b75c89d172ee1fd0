"""The part of an engine that plans, starts programs and reads what they have drawn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.engine import filling
from mpjax.engine.clock import Clock
from mpjax.engine.compiled import Programs
from mpjax.engine.handle import Event, Handle, New, PromptLogprobs, Scores
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import NOBODY, Decode, Extend, Piece, Planner
from mpjax.engine.program_run import ProgramRun
from mpjax.engine.programs import Drawn, PromptScores
from mpjax.engine.request import Request
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import EngineState
from mpjax.finite import NotFiniteError
from mpjax.language_model import LanguageModel
from mpjax.speculation.proposer import Proposer
from mpjax.speculation.report import SpeculationReport


class Runner:
    """Runs the requests of an engine, a program at a time, in one thread.

    sizes: of the engine. max_tokens: the most tokens of a request. proposer: of tokens that steps
    verify; None for none.
    """

    def __init__(
        self,
        lm: LanguageModel,
        sizes: Sizes,
        max_tokens: int,
        proposer: Proposer | None = None,
    ) -> None:
        self.planner = Planner(sizes)
        self.requests: dict[Handle, Request] = {}
        self.steps = self.late_steps = self.new_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0
        self.programs = Programs(lm.for_device, sizes, proposer)
        self.clock = Clock()
        self.observer: Callable[[ProgramRun], None] | None = None
        self._dtype = lm.config.dtype
        self._state = EngineState.create(lm, sizes.slots, sizes.pages, max_tokens, proposer)
        self._pending: _Pending | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.planner.waiting or self.planner.running or self._pending)

    def compile(self, *, greedy_only: bool) -> None:
        """Compiles all programs; nobody else may run one meanwhile."""
        self._state = self.programs.compile(self._state, greedy_only=greedy_only)
        if self.has_work:
            self.clock.skip()

    def submit(self, request: Request) -> None:
        """Adds a request, which waits."""
        self.requests[request.handle] = request
        self.planner.submit(request.row)

    def step(self) -> list[Event]:
        """Starts the next program, and reads what the one before has drawn."""
        self.steps += 1
        plan, pending, before = self.planner.plan(), None, self._pending
        if plan is not None:
            pending = self._start(plan)
        self._pending = pending
        events = [] if before is None else self._read(before)
        if not self.has_work:
            self.clock.rest()
        return events

    def _start(self, plan: Extend | Decode) -> _Pending:
        """Starts a program. Where the host has to compile it, its seconds tell nothing."""
        before, known = self._pending, len(self.programs.used)
        self._clear(self.planner.take_left())
        pending = self._extend(plan) if isinstance(plan, Extend) else self._decode(plan)
        if len(self.programs.used) > known:
            self.clock.skip()
            pending.is_measured = False
            if before is not None:
                before.is_measured = False
        elif isinstance(plan, Decode) and self.programs.holds_host:
            self._measure(pending)
            pending.is_measured = False
        return pending

    def _begin(self) -> float:
        """The time when a program is started; counts whether the device has waited for it."""
        before = self._pending
        is_late = before is not None and before.drawn.tokens.is_ready()
        if before is not None and is_late:
            self.late_steps += 1
            before.is_measured = False
        return self.clock.start(is_free=before is None or is_late)

    def _await(self, pending: _Pending) -> None:
        """Measures a program before the next one, which holds the host until it has ended itself.

        The end of this program is not known later. The next one is launched late by that, which
        costs little, since the device waits for the host in it anyway.
        """
        if not pending.drawn.tokens.is_ready():
            pending.drawn.tokens.block_until_ready()
            self._measure(pending)
            pending.is_measured = False

    def end(self, request: Request, reason: str, error: Exception | None = None) -> Event:
        """Ends a request before the device has, so that it may leave NaN behind in the cache."""
        self._end(request, reason, error, is_finite=False)
        return request.handle.report([])

    def free(self) -> None:
        """Frees the cache; no step may follow. Nothing happens the second time."""
        self.__dict__.pop("_state", None)
        self._pending = None

    def _extend(self, plan: Extend) -> _Pending:
        riders = [] if plan.riders is None else plan.riders.rows
        greedy = all(row.is_greedy for row in [*riders, *(piece.row for piece in plan.pieces)])
        kind = {"greedy": greedy and not plan.scored, "scored": plan.scored}
        slots, entries = self._state.tables.shape
        read = [piece.row for piece in plan.pieces]
        columns = self.programs.column_size([*read, *riders], entries)
        pieces = self.programs.piece_size(len(read))
        rows = self.programs.rider_size(len(riders), **kind)
        tokens = self.programs.reading_size(plan.tokens, rows, **kind)
        reading = filling.reading(
            plan.pieces,
            tokens=tokens,
            rows=pieces,
            slots=slots,
            entries=columns,
            by_length=self._state.rotary_lengths is not None,
        )
        self._begin_histories(plan.pieces)
        stepping = None
        if rows:
            size = {"slots": slots, "entries": entries, "columns": columns}
            stepping = filling.stepping(plan.riders or NOBODY, rows=rows, **size)
        begin = self._begin()
        self._state, drawn, scores = self.programs.extend(self._state, reading, stepping, **kind)
        drawers = [_Drawer(i, piece.row) for i, piece in enumerate(plan.pieces) if piece.is_last]
        drawers += [_Drawer(pieces + i, row) for i, row in enumerate(riders)]
        context = max([piece.end for piece in plan.pieces] + [row.length for row in riders])
        return _Pending(plan, drawers, drawn, scores, begin, tokens, context)

    def _decode(self, plan: Decode) -> _Pending:
        kind: dict[str, Any] = {"steps": plan.steps, "greedy": plan.greedy}
        slots, entries = self._state.tables.shape
        size = self.programs.decoding_size(len(plan.rows), **kind)
        columns = self.programs.column_size(plan.rows, entries)
        stepping = filling.stepping(plan, rows=size, slots=slots, entries=entries, columns=columns)
        if self.programs.holds_host and self._pending is not None:
            self._await(self._pending)
        begin = self._begin()
        self._state, drawn = self.programs.decode(self._state, stepping, plan)
        drawers = list(itertools.starmap(_Drawer, enumerate(plan.rows)))
        context = max(row.length for row in plan.rows)
        return _Pending(plan, drawers, drawn, None, begin, size, context)

    def _begin_histories(self, pieces: Sequence[Piece]) -> None:
        """Tells proposers the tokens of rows that begin."""
        if self._state.speculation is None:
            return
        for row in [piece.row for piece in pieces if piece.is_first]:
            assert row.slot is not None
            tokens = filling.history(row, self._state.speculation.history.shape[1])
            slot, count = np.int32(row.slot), np.int32(len(row.tokens))
            self._state = self.programs.begin_history(self._state, slot, tokens, count)

    def _read(self, pending: _Pending) -> list[Event]:
        """Reads what a program has drawn: waits for the device, and tells the requests."""
        tokens, logprobs, counts, running = map(np.asarray, pending.drawn.arrays)
        self._measure(pending)
        if pending.scores is not None:
            self._keep_scores(pending)
        events = []
        asked = any(drawer.row.owner.settings.candidates for drawer in pending.drawers)
        # Whole arrays: a slice on the device would run behind the program that has just begun.
        candidates = [np.asarray(x) for x in pending.drawn.candidates] if asked else []
        done = jax.tree.leaves(jax.tree.map(np.asarray, pending.drawn.speculated))
        for drawer in pending.drawers:
            index, row = drawer.index, drawer.row
            if row.slot is None or row.runs != drawer.runs:
                continue  # it was cancelled, or made room for another and will be read again
            count = counts[index]
            new = New(tokens[index, :count].tolist(), logprobs[index, :count].tolist())
            if number := row.owner.settings.candidates:
                top, chances = (x[index, :count] for x in candidates)
                pairs = zip(top[:, :number].tolist(), chances[:, :number].tolist(), strict=True)
                new.candidates.extend(list(zip(*pair, strict=True)) for pair in pairs)
            if done:
                numbers = [int(x[index]) for x in done]
                self._count(row.owner.handle, [*numbers, len(new.tokens)])
            events.append(self._tell(row, new, is_ended=not running[index]))
        return events

    def _measure(self, pending: _Pending) -> None:
        """Tells the planner the seconds of a program that has just ended."""
        begin, seconds = self.clock.end(pending.begin)
        plan, pace = pending.plan, self.planner.pace
        if self.observer is not None:
            self.observer(_run(pending, begin, seconds))
        if not pending.is_measured:
            return
        if isinstance(plan, Decode):
            steps = _steps(pending)
            if steps:
                pace.learn_step(seconds / steps)
        elif not plan.scored:
            pace.learn_reading(pending.size, plan.work, seconds)

    def _tell(self, row: Row, new: New, *, is_ended: bool) -> Event:
        """Gives a request its new tokens, and ends it where they end it."""
        request: Request = row.owner
        handle = request.handle
        if np.isnan(new.logprobs).any():
            error = NotFiniteError("request", handle.number, self._dtype)
            return self.end(request, "error", error)
        handle.shared_tokens = row.shared
        taken = handle.push(new)
        self.new_tokens += taken
        self.planner.learn(row, new.tokens[:taken])
        if handle.has_stopped or is_ended:
            is_stop = handle.has_stopped or handle.tokens[-1] in request.settings.stop_ids
            # At a stop string the device goes on until it hears of it.
            self._end(request, "stop" if is_stop else "length", is_finite=is_ended)
        return handle.report(new.tokens[:taken])

    def _count(self, handle: Handle, counts: Sequence[int]) -> None:
        """Adds what a program has done by speculation for a request, as a report has it."""
        self.proposed_tokens += counts[0]
        self.accepted_tokens += counts[1]
        more = SpeculationReport(*([count] for count in counts))
        handle.speculation = more if handle.speculation is None else handle.speculation + more

    def _keep_scores(self, pending: _Pending) -> None:
        """Keeps the log-probabilities of prompts' tokens with their requests."""
        assert isinstance(pending.plan, Extend)
        assert pending.scores is not None
        arrays = [np.asarray(x) for x in pending.scores.arrays]
        at = 0
        for piece in pending.plan.pieces:
            count = piece.end - piece.start
            request: Request = piece.row.owner
            logprobs, *top = (x[at : at + count] for x in arrays)
            at += count
            handle = request.handle
            if handle.prompt_logprobs is not None:
                continue  # the row is read again
            request.scores = [s for s in request.scores if s.start < piece.start]
            request.scores.append(Scores(piece.start, logprobs, *top))
            if piece.is_last:
                handle.prompt_logprobs = PromptLogprobs.join(
                    request.scores, len(handle.prompt), request.settings.candidates
                )

    def _end(
        self, request: Request, reason: str, error: Exception | None = None, *, is_finite: bool
    ) -> None:
        del self.requests[request.handle]
        request.handle.finish(reason, error)
        if request.row.is_known:
            self.planner.remove(request.row, is_finite=is_finite)

    def _clear(self, left: Sequence[tuple[int, list[int]]]) -> None:
        for slot, pages in left:
            padded = np.full(self._state.tables.shape[1], NOWHERE, np.int32)
            padded[: len(pages)] = pages
            self._state = self.programs.clear(self._state, padded, np.int32(slot))


class _Drawer:
    """A row of which a program draws tokens.

    index: of the row among the results. runs: of the row when the program was started.
    """

    def __init__(self, index: int, row: Row) -> None:
        self.index, self.row, self.runs = index, row, row.runs


@dataclasses.dataclass(eq=False)
class _Pending:
    """A program that was started, and is to be read.

    drawn, scores: its results, on the device. begin: the time when it was started. size: tokens
    that it reads, or rows that decode, with padding. context: tokens that its queries attend to, of
    the row with the most. is_measured: whether its seconds are known by those when it was started
    and read.
    """

    plan: Extend | Decode
    drawers: list[_Drawer]
    drawn: Drawn
    scores: PromptScores | None
    begin: float
    size: int
    context: int
    is_measured: bool = True


def _run(pending: _Pending, begin: float, seconds: float) -> ProgramRun:
    """The report of a program that has ended."""
    plan, rows = pending.plan, len(pending.drawers)
    steps = int(plan.riders is not None) if isinstance(plan, Extend) else _steps(pending)
    return ProgramRun(
        kind="read" if isinstance(plan, Extend) else "decode",
        size=pending.size,
        tokens=plan.tokens if isinstance(plan, Extend) else 0,
        rows=rows,
        steps=steps,
        context=pending.context,
        begin=begin,
        seconds=seconds,
        is_measured=pending.is_measured,
    )


def _steps(pending: _Pending) -> int:
    """The steps of a program that has decoded; with speculation, those of its longest row.

    There the loop ends early where a row has got the most tokens, or where all rows end.
    """
    assert isinstance(pending.plan, Decode)
    done = pending.drawn.speculated
    return pending.plan.steps if done is None else int(np.asarray(done.steps).max())
