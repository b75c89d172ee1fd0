"""The part of an engine that plans, starts programs and reads what they have drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.engine import filling
from mpjax.engine.compiled import Programs
from mpjax.engine.handle import Event, Handle, PromptLogprobs, Scores
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import Decode, Extend, Planner, Row, Sizes
from mpjax.engine.programs import Drawn, PromptScores
from mpjax.engine.request import Request
from mpjax.engine.state import EngineState
from mpjax.finite import NotFiniteError
from mpjax.language_model import LanguageModel


class Runner:
    """Runs the requests of an engine, a program at a time, in one thread.

    sizes: of the engine. max_tokens: the most tokens of a request.
    """

    def __init__(self, lm: LanguageModel, sizes: Sizes, max_tokens: int) -> None:
        self.planner = Planner(sizes)
        self.requests: dict[Handle, Request] = {}
        self.steps = self.late_steps = self.new_tokens = 0
        self.programs = Programs(lm.model, chunk=sizes.chunk, slots=sizes.slots, steps=sizes.steps)
        self._dtype = lm.config.dtype
        self._state = EngineState.create(lm, sizes.slots, sizes.pages, max_tokens)
        self._pending: _Pending | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.planner.waiting or self.planner.running or self._pending)

    def submit(self, request: Request) -> None:
        """Adds a request, which waits."""
        self.requests[request.handle] = request
        self.planner.submit(request.row)

    def step(self) -> list[Event]:
        """Starts the next program, and reads what the one before has drawn."""
        self.steps += 1
        plan, pending, before = self.planner.plan(), None, self._pending
        if plan is not None:
            is_late = before is not None and before.drawn.tokens.is_ready()
            self._clear(self.planner.take_left())
            pending = self._extend(plan) if isinstance(plan, Extend) else self._decode(plan)
            self.late_steps += is_late
        self._pending = pending
        return [] if before is None else self._read(before)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> Event:
        """Ends a request before the device has, so that it may leave NaN behind in the cache."""
        self._end(request, reason, error, is_finite=False)
        return request.handle.report([])

    def free(self) -> None:
        """Frees the cache; no step may follow. Nothing happens the second time."""
        self.__dict__.pop("_state", None)
        self._pending = None

    def _extend(self, plan: Extend) -> _Pending:
        count = sum(piece.end - piece.start for piece in plan.pieces)
        kind = {
            "greedy": not plan.scored and all(piece.row.is_greedy for piece in plan.pieces),
            "scored": plan.scored,
        }
        slots, entries = self._state.tables.shape
        reading = filling.reading(
            plan.pieces,
            tokens=self.programs.reading_size(count, **kind),
            rows=self.planner.sizes.sequences,
            slots=slots,
            entries=entries,
        )
        self._state, drawn, scores = self.programs.extend(self._state, reading, **kind)
        return _Pending(plan, [piece.row.runs for piece in plan.pieces], drawn, scores)

    def _decode(self, plan: Decode) -> _Pending:
        kind: dict[str, Any] = {"steps": plan.steps, "greedy": plan.greedy}
        slots, entries = self._state.tables.shape
        size = self.programs.decoding_size(len(plan.rows), **kind)
        stepping = filling.stepping(plan, rows=size, slots=slots, entries=entries)
        self._state, drawn = self.programs.decode(self._state, stepping, **kind)
        return _Pending(plan, [row.runs for row in plan.rows], drawn, None)

    def _read(self, pending: _Pending) -> list[Event]:
        """Reads what a program has drawn: waits for the device, and tells the requests."""
        tokens, logprobs, counts, running = map(np.asarray, pending.drawn.arrays)
        if pending.scores is not None:
            self._keep_scores(pending)
        events = []
        for index, row in enumerate(pending.rows):
            if row.slot is None or row.runs != pending.runs[index]:
                continue  # it was cancelled, or made room for another and will be read again
            if isinstance(pending.plan, Extend) and not pending.plan.pieces[index].is_last:
                continue
            count = counts[index]
            new, chances = tokens[index, :count].tolist(), logprobs[index, :count].tolist()
            events.append(self._tell(row, new, chances, is_ended=not running[index]))
        return events

    def _tell(self, row: Row, tokens: list[int], chances: list[float], *, is_ended: bool) -> Event:
        """Gives a request its new tokens, and ends it where they end it."""
        request: Request = row.owner
        handle = request.handle
        if np.isnan(chances).any():
            error = NotFiniteError("request", handle.number, self._dtype)
            return self.end(request, "error", error)
        handle.shared_tokens = row.shared
        taken = handle.push(tokens, chances)
        self.new_tokens += taken
        self.planner.learn(row, tokens[:taken])
        if handle.has_stopped or is_ended:
            is_stop = handle.has_stopped or handle.tokens[-1] in request.settings.stop_ids
            # At a stop string the device goes on until it hears of it.
            self._end(request, "stop" if is_stop else "length", is_finite=is_ended)
        return handle.report(tokens[:taken])

    def _keep_scores(self, pending: _Pending) -> None:
        """Keeps the log-probabilities of prompts' tokens with their requests."""
        assert isinstance(pending.plan, Extend)
        assert pending.scores is not None
        arrays = [np.asarray(x) for x in pending.scores.arrays]
        at = 0
        for piece in pending.plan.pieces:
            count = piece.end - piece.start
            request: Request = piece.row.owner
            logprobs, *best = (x[at : at + count] for x in arrays)
            at += count
            handle = request.handle
            if handle.prompt_logprobs is not None:
                continue  # the row is read again
            request.scores = [s for s in request.scores if s.start < piece.start]
            request.scores.append(Scores(piece.start, logprobs, *best))
            if piece.is_last:
                handle.prompt_logprobs = PromptLogprobs.join(request.scores, len(handle.prompt))

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


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A program that was started, and is to be read.

    runs: of each row, when it was started. drawn, scores: its results, on the device.
    """

    plan: Extend | Decode
    runs: list[int]
    drawn: Drawn
    scores: PromptScores | None

    @property
    def rows(self) -> list[Row]:
        """The rows of the program, in the order of its results."""
        if isinstance(self.plan, Extend):
            return [piece.row for piece in self.plan.pieces]
        return self.plan.rows
