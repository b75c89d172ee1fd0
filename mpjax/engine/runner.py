"""The Runner of an engine: plans, launches programs and reads their tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.engine import filling
from mpjax.engine.choosing import Forwarded
from mpjax.engine.clock import Clock
from mpjax.engine.compiled import Programs
from mpjax.engine.controlled import (
    OnDevice,
    PackedControl,
    constraint_places,
    create_control,
    rule_places,
)
from mpjax.engine.forcing import look_ahead, take_forced
from mpjax.engine.handle import Event, Handle, New
from mpjax.engine.pending import (
    Pending,
    Received,
    Untold,
    drafts_of,
    keep_captured,
    keep_scores,
    run_of,
    steps_of,
    top_of,
)
from mpjax.engine.planner import Decode, Extend, Planner
from mpjax.engine.processes import Launch
from mpjax.engine.program_run import Drawer, ProgramRun
from mpjax.engine.programs import Stepping
from mpjax.engine.request import Request
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import committed, create_state, places
from mpjax.engine.watching import Watches
from mpjax.errors import NotFiniteError
from mpjax.generation.speculation.proposer import Proposer
from mpjax.generation.speculation.report import SpeculationReport
from mpjax.generation.state import State
from mpjax.language_model import LanguageModel
from mpjax.sampling.processors import Attachment, Processor


class Runner:
    """Runs the requests of an engine, a program at a time, in one thread.

    sizes: the engine's sizes. max_tokens: the most tokens of a request. proposer: of speculative
    decoding, or None. processors: logits processors that requests may use beside those of Sampling.
    """

    def __init__(
        self,
        lm: LanguageModel,
        sizes: Sizes,
        max_tokens: int,
        proposer: Proposer | None = None,
        processors: tuple[Processor, ...] = (),
    ) -> None:
        self.planner = Planner(sizes)
        self.requests: dict[Handle, Request] = {}
        self.steps = self.late_steps = self.new_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0
        self.proposer = proposer
        self.programs = Programs(lm.for_device, sizes, proposer, lm.adapters)
        self._adapters = lm.adapters
        self.clock = Clock()
        self.observer: Callable[[ProgramRun], None] | None = None
        self.processors = (*constraint_places(lm, sizes), *rule_places(lm, processors, max_tokens))
        self._lm = lm
        self.watches = Watches()
        # Processors of all slots, created with the first request that has any; and the slots in
        # use.
        self._attached: Attachment = ()
        self._controlled: set[int] = set()
        self.planner.version = lm.version
        self._create_state = functools.partial(
            create_state,
            *(lm, sizes.slots, sizes.pages, max_tokens, proposer, sizes.stop_ids, sizes.snapshots),
        )
        self._state = committed(self._create_state(), self._lm.model.mesh)
        self._layout = filling.Layout.of(self._state)
        self._pending: Pending | None = None
        self._forwarded: Any = None  # of another process's last program, if it was `forward`
        self._untold = Untold()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.planner.waiting or self.planner.running or self._pending)

    def statistics(self, coming: int) -> dict[str, float]:
        """The counts of `Engine.statistics`. coming: number of requests still in the inbox."""
        planner, groups, clock = self.planner, self.planner.groups, self.clock
        return {
            "running": len(planner.running),
            "waiting": len(planner.waiting) + coming,
            "pages": groups.pages,
            "free_pages": groups.available,
            "kept_pages": groups.kept,
            "snapshots": groups.snapshots.count,
            "kept_snapshots": groups.snapshots.kept,
            "prompt_tokens": planner.prompt_tokens,
            "shared_tokens": planner.shared_tokens,
            "new_tokens": self.new_tokens,
            "proposed_tokens": self.proposed_tokens,
            "accepted_tokens": self.accepted_tokens,
            "preemptions": planner.preemptions,
            "steps": self.steps,
            "late_steps": self.late_steps,
            "work_seconds": clock.work_seconds,
            "idle_seconds": clock.idle_seconds,
            "programs": len(self.programs.used),
        }

    @functools.cached_property
    def _on_device(self) -> OnDevice:
        return OnDevice(self._lm, self.processors)

    def compile(self, *, greedy_only: bool) -> None:
        """Compiles all programs; no other thread may run one meanwhile."""
        self.take_weights()
        self._state = self.programs.compile(self._state, greedy_only=greedy_only)
        if not greedy_only:
            none, state = self._on_device(None), self._with_control()
            self._keep(self.programs.compile(state, greedy_only=False, control=none))
            if not self._controlled:
                self._attached = ()
        if self.has_work:
            self.clock.skip()

    def submit(self, request: Request) -> None:
        """Adds a request to the waiting ones."""
        self.requests[request.handle] = request
        look_ahead(request.row, 1, self.planner.sizes)  # after the token that its prefill draws
        self.planner.submit(request.row)

    def take_weights(self) -> None:
        """Takes the model's current weights if they have changed."""
        if self.planner.version != self._lm.version:
            self.programs.renew(self._lm.for_device)
            self.planner.renew(self._lm.version)

    def drain(self) -> list[Event]:
        """Waits for the program in flight, and reports its tokens to the requests."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._untold.add(self._receive(pending))
        self.clock.rest()
        return self._tell_all()

    @property
    def is_asleep(self) -> bool:
        """Whether there is no cache."""
        return "_state" not in self.__dict__

    def sleep(self) -> None:
        """Frees the cache and releases the model's arrays; no program may be in flight.

        Running rows wait, and are prefilled again after `wake`.
        """
        self.planner.put_back()
        self.planner.take_left()
        self.planner.groups.forget()
        self.free()
        self.programs.renew(None)
        self._controlled.clear()

    def wake(self) -> None:
        """Makes the cache again, and takes the model's arrays."""
        if self.is_asleep:
            self._state = committed(self._create_state(), self._lm.model.mesh)
            self.programs.renew(self._lm.for_device)

    def step(self) -> list[Event]:
        """Launches the next program, then reads the tokens of the previous one."""
        self.steps += 1
        self.take_weights()
        # Rows are preempted or admitted only after requests have got their tokens.
        events = [] if self.planner.is_settled else self._tell_all()
        plan, pending, before = self.planner.plan(), None, self._pending
        if plan is not None:
            pending = self._start(plan)
        self._pending = pending
        if before is not None:
            self._untold.add(self._receive(before))
        if pending is not None and pending.forwarded is not None:
            self._choose(pending, *pending.forwarded)
        if not self._untold.may_wait(pending, self.planner.sizes.steps):
            events += self._tell_all()  # while the device works
        if not self.has_work:
            self.clock.rest()
        return events

    def _start(self, plan: Extend | Decode) -> Pending:
        """Launches a program. If that compiles it, its seconds and the last ones don't count."""
        before, known = self._pending, len(self.programs.used)
        self._clear(self.planner.take_left())
        self._copy(self.planner.take_copies())
        pending = self._extend(plan) if isinstance(plan, Extend) else self._decode(plan)
        pending.weights = self.planner.version
        if pending.drawn is not None:
            pending.fetch()
        if len(self.programs.used) > known:
            self.clock.skip()
            pending.is_measured = False
            if before is not None:
                before.is_measured = False
        elif self.programs.holds_host and pending.drawn is not None and isinstance(plan, Decode):
            self._measure(pending)
            pending.is_measured = False
        return pending

    def _begin(self) -> float:
        """The launch time of a program; counts the step as late if the device was idle."""
        before = self._pending
        is_late = before is not None and before.results.packed.is_ready()
        if before is not None and is_late:
            self.late_steps += 1
            before.is_measured = False
        return self.clock.start(is_free=before is None or is_late)

    def _await(self, pending: Pending) -> None:
        """Waits for a program and measures it, before a launch that blocks the host.

        After that launch, the program's end could no longer be measured. Waiting delays the launch,
        which costs little, since the launched loop waits for the host anyway.
        """
        if not pending.results.packed.is_ready():
            pending.results.packed.block_until_ready()
            self._measure(pending)
            pending.is_measured = False

    def end(self, request: Request, reason: str, error: Exception | None = None) -> Event:
        """Ends a request that may still run on the device and may leave NaN in the cache."""
        self._end(request, reason, error, is_finite=False)
        return request.handle.report([])

    def _end_not_finite(self, request: Request) -> Event:
        error = NotFiniteError("request", request.handle.number, self._lm.config.dtype)
        return self.end(request, "error", error)

    def free(self) -> None:
        """Frees the cache; no step may follow. A second call has no effect."""
        self.__dict__.pop("_state", None)
        self._pending, self._attached, self._untold = None, (), Untold()

    def _with_control(self) -> State:
        """The state with the processors of all slots."""
        if not self._attached:
            slots = self.planner.sizes.slots
            created = create_control(self._lm, slots, self.processors)
            self._attached = committed(created, self._lm.model.mesh)
        return dataclasses.replace(self._state, processors=self._attached)

    def _state_of(self, rows: Sequence[Row]) -> State:
        """The state for a program of these rows: with processors only if a row has any."""
        return self._with_control() if any(row.is_controlled for row in rows) else self._state

    def _keep(self, state: State) -> None:
        """Stores the state that a program has returned."""
        self._attached = state.processors or self._attached
        self._state = dataclasses.replace(state, processors=())

    def follow(self, launch: Launch) -> None:
        """Launches the program that process 0 has launched."""
        state = self._with_control() if launch.controlled else self._state
        first, *others = launch.arguments
        if launch.name == "choose":
            others.insert(1, (*self._forwarded[:-1], None))  # without captures
        elif launch.name == "begin_control" and others[0] is not None:
            others[0] = jax.tree.unflatten(jax.tree.structure(self._on_device(None)), others[0])
        found = getattr(self.programs, launch.name)(state, first, *others, **dict(launch.how))
        state, *results = [found] if isinstance(found, State) else found
        self._keep(state)
        self._forwarded = results[0] if launch.name == "forward" else None

    def _extend(self, plan: Extend) -> Pending:
        read = [piece.row for piece in plan.pieces]
        greedy = all(row.is_greedy for row in read)
        kind = {"greedy": greedy and not plan.scored, "scored": plan.scored}
        _, entries = places(self._state)
        columns = self.programs.column_size(read, entries)
        tokens = self.programs.reading_size(plan.tokens, **kind)
        reading = filling.reading(
            plan.pieces,
            self._layout,
            tokens=tokens,
            rows=self.programs.piece_size(len(read)),
            entries=columns,
            masks=self.programs.no_masks if any(row.is_controlled for row in read) else None,
        )
        self._begin_rows([piece.row for piece in plan.pieces if piece.is_first])
        for piece in plan.pieces:
            if piece.begins_forced:
                self._begin_control(piece.row, None, len(piece.row.tokens) - piece.forced)
        begin = self._begin()
        state, drawn, scores = self.programs.extend(self._state_of(read), reading, **kind)
        self._keep(state)
        kept = [piece for piece in plan.pieces if piece.snapshot is not None]
        self._copy([(piece.row.slot, piece.snapshot) for piece in kept])
        drawers = [Drawer(i, piece.row, piece) for i, piece in enumerate(plan.pieces)]
        context = max(piece.end for piece in plan.pieces)
        return Pending(plan, drawers, drawn, scores, begin, tokens, context)

    def _decode(self, plan: Decode) -> Pending:
        kind: dict[str, Any] = {"steps": plan.steps, "greedy": plan.greedy}
        _, entries = places(self._state)
        size = self.programs.decoding_size(len(plan.rows), **kind)
        stepping = filling.stepping(
            plan,
            self._layout,
            rows=size,
            entries=entries,
            columns=self.programs.column_size(plan.rows, entries),
        )
        if self.programs.holds_host and self._pending is not None:
            self._await(self._pending)
        begin = self._begin()
        drawn, forwarded = None, None
        if any(row.is_constrained for row in plan.rows):
            stepping = self.programs.put(stepping)  # for both programs
            state, found = self.programs.forward(self._with_control(), stepping, plan)
            forwarded = stepping, found
        else:
            state, drawn = self.programs.decode(self._state_of(plan.rows), stepping, plan)
        self._keep(state)
        drawers = list(itertools.starmap(Drawer, enumerate(plan.rows)))
        context = max(row.length for row in plan.rows)
        return Pending(plan, drawers, drawn, None, begin, size, context, forwarded=forwarded)

    def _choose(self, pending: Pending, stepping: Stepping, forwarded: Forwarded) -> None:
        """Launches `choose` after `forward`, now that all earlier tokens are known.

        Masks are computed while `forward` runs; with speculation, after waiting for its proposals.
        """
        plan, proposal, state = pending.plan, forwarded[1], self._with_control()
        assert isinstance(plan, Decode)
        masks = self.programs.no_masks(pending.size)
        masks = filling.fill_masks(masks, plan.rows, drafts_of(proposal))
        # Only `forward` captures activations, so `choose` is the same program for all rows.
        stepping, (*rest, captured) = dataclasses.replace(stepping, watching=None), forwarded
        likeliest = all(row.owner.settings.takes_likeliest for row in plan.rows)
        state, drawn = self.programs.choose(
            state, stepping, plan, (*rest, None), masks, likeliest=likeliest and proposal is None
        )
        pending.drawn = dataclasses.replace(drawn, captured=captured)
        pending.is_masked = proposal is None and captured is None
        pending.forwarded = None  # the next step's logits take the place of these
        pending.fetch()
        self._keep(state)

    def _begin_rows(self, rows: Sequence[Row]) -> None:
        """Passes the tokens of rows with a new slot to the proposer and the logits processors."""
        room = places(self._state)[1] * self._state.cache.page_size
        for row in rows:
            assert row.slot is not None
            slot, count = np.int32(row.slot), np.int32(len(row.tokens))
            if self._state.speculation is not None:
                tokens = filling.history(row, room)
                self._state = self.programs.begin_history(self._state, slot, tokens, count)
            if row.is_controlled or row.slot in self._controlled:
                control = self._on_device(row.owner.settings.control)
                self._begin_control(row, control, row.prompt)
                self._controlled -= {row.slot}
                self._controlled |= {row.slot} if row.is_controlled else set()

    def _begin_control(self, row: Row, control: PackedControl | None, read: int) -> None:
        """Advances `control`, or without it the processors in the row's slot, by the row's tokens.

        read: the number of tokens that the processors have seen; of a new row, the prompt's.
        """
        assert row.slot is not None
        tokens = filling.history(row, places(self._state)[1] * self._state.cache.page_size)
        numbers = filling.numbers(row.slot, read, len(row.tokens), tokens)
        self._keep(self.programs.begin_control(self._with_control(), numbers, control))

    def _receive(self, pending: Pending) -> list[Received]:
        """Waits for a program's results, and lets the matchers of constraints follow them."""
        tokens, logprobs, counts, running = (each.tolist() for each in pending.results.arrays)
        self._measure(pending)
        if pending.scores is not None:
            keep_scores(pending)
        keep_captured(pending)
        found = []
        asked = any(drawer.row.owner.settings.top_logprobs for drawer in pending.drawers)
        # Copy whole arrays: a slice on the device would wait for the program launched just now.
        top_logprobs = [np.asarray(x) for x in pending.results.top_logprobs] if asked else []
        done = jax.tree.leaves(jax.tree.map(np.asarray, pending.results.speculated))
        for drawer in pending.drawers:
            index, row = drawer.index, drawer.row
            if not drawer.is_current:
                continue  # cancelled, or preempted and waiting
            if (piece := drawer.piece) is not None:
                if math.isnan(logprobs[index][0]):
                    # It ends now: pages before windows are released only after finite pieces.
                    found.append(Received(drawer, New([], [math.nan])))
                    continue
                self.planner.learn_piece(piece)
                if not piece.is_last:
                    continue
            count = counts[index]
            number = row.owner.settings.top_logprobs
            top = top_of(top_logprobs, index, count, number) if number else []
            new = New(tokens[index][:count], logprobs[index][:count], top, pending.weights)
            if piece is not None and piece.forced:
                new = take_forced(row.owner, piece) + new
            if done:
                numbers = [int(x[index]) for x in done]
                self._count(row.owner.handle, [*numbers, len(new.tokens)])
            found.append(Received(drawer, new, is_ended=not running[index]))
            found[-1].follow()
        return found

    def _measure(self, pending: Pending) -> None:
        """Reports the seconds of a program that has just ended to the pace and the observer."""
        begin, seconds = self.clock.end(pending.begin)
        plan, pace = pending.plan, self.planner.pace
        if self.observer is not None:
            self.observer(run_of(pending, begin, seconds))
        if not pending.is_measured:
            return
        if isinstance(plan, Decode):
            steps = steps_of(pending)
            if steps:
                pace.learn_step(seconds / steps)
        elif not plan.scored:
            pace.learn_reading(pending.size, plan.work, seconds)

    def _tell_all(self) -> list[Event]:
        return [self._tell(one) for one in self._untold.take()]

    def _tell(self, received: Received) -> Event:
        """Passes new tokens to a request, and ends it if it is complete."""
        row, new, is_ended = received.row, received.new, received.is_ended
        request: Request = row.owner
        handle = request.handle
        if not received.is_finite:
            return self._end_not_finite(request)
        handle.shared_tokens = row.shared
        taken = handle.push(new)
        self.new_tokens += taken
        if received.error is not None and not handle.has_stopped:
            return self.end(request, "error", received.error)
        self.planner.learn(row, new.tokens[:taken], received.programs)
        if handle.has_stopped or is_ended:
            is_stop = handle.has_stopped or (
                bool(handle.tokens) and request.settings.is_stop(handle.tokens[-1])
            )
            # At a stop string, programs in flight still run the row.
            self._end(request, "stop" if is_stop else "length", is_finite=is_ended)
        elif row.slot is not None:
            look_ahead(row, sum(most for _, most in row.flights), self.planner.sizes)
        return handle.report(new.tokens[:taken])

    def _count(self, handle: Handle, counts: Sequence[int]) -> None:
        """Adds a program's counts of proposed, accepted and drawn tokens to a request's report."""
        self.proposed_tokens += counts[0]
        self.accepted_tokens += counts[1]
        more = SpeculationReport(*([count] for count in counts))
        handle.speculation = more if handle.speculation is None else handle.speculation + more

    def _end(
        self, request: Request, reason: str, error: Exception | None = None, *, is_finite: bool
    ) -> None:
        del self.requests[request.handle]
        self._adapters.give_back(request.row.adapter)
        request.handle.finish(reason, error)
        if request.row.is_known:
            self.planner.remove(request.row, is_finite=is_finite)

    def _clear(self, left: Sequence[tuple[int, list[list[int]]]]) -> None:
        for slot, pages in left:
            padded = filling.padded(pages, places(self._state)[1])
            self._state = self.programs.clear(self._state, padded, np.int32(slot))

    def _copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        for source, target in pairs:
            self._state = self.programs.copy(self._state, np.int32(source), np.int32(target))
