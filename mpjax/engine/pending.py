"""Programs that an engine has launched, and whose results the host has not read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from mpjax.engine.choosing import Forwarded
from mpjax.engine.handle import New, PromptLogprobs, Scores
from mpjax.engine.planner import Decode, Extend
from mpjax.engine.program_run import Drawer, ProgramRun
from mpjax.engine.programs import Drawn, PromptScores, Stepping
from mpjax.engine.request import Request
from mpjax.engine.row import Row
from mpjax.generation.speculation.proposer import Proposal

MANY_ROWS = 16  # rows whose requests get tokens of several steps at once


@dataclasses.dataclass(eq=False)
class Pending:
    """A launched program whose results the host has not read.

    drawn, scores: its results, on the device. begin: launch time. size: padded number of prefill
    tokens or of decoding rows. context: tokens that its queries attend to, in the row with the
    most. is_measured: whether its launch and end give its duration on the device. forwarded: for a
    constrained step, the results of `forward`; `drawn` is that of `choose`.
    weights: the version of the weights. is_masked: whether the host has masked its tokens, which
    were neither proposed nor captured.
    """

    plan: Extend | Decode
    drawers: list[Drawer]
    drawn: Drawn | None
    scores: PromptScores | None
    begin: float
    size: int
    context: int
    is_measured: bool = True
    forwarded: tuple[Stepping, Forwarded] | None = None
    weights: int = 0
    is_masked: bool = False

    @property
    def results(self) -> Drawn:
        """The drawn tokens."""
        assert self.drawn is not None, "the second program has not been started"
        return self.drawn

    def fetch(self) -> None:
        """Begins to copy the results to the host, so that reading them later waits only once."""
        results = self.results
        wanted = results.packed, results.speculated, results.captured, self.scores
        for array in jax.tree.leaves(wanted):
            array.copy_to_host_async()


@dataclasses.dataclass
class Received:
    """A row's new tokens, which its request has not got yet.

    drawer: the row's entry in the program, or in the last of several programs. is_ended: whether
    the row has ended on the device. error: of its constraint's matcher. programs: the number of
    programs that have drawn the tokens.
    """

    drawer: Drawer
    new: New
    is_ended: bool = False
    error: ValueError | None = None
    programs: int = 1

    @property
    def row(self) -> Row:
        """The row."""
        return self.drawer.row

    @property
    def is_finite(self) -> bool:
        """Whether the logits were finite."""
        return not any(map(math.isnan, self.new.logprobs))

    @property
    def goes_on(self) -> bool:
        """Whether the row can draw further tokens before its request gets these tokens.

        A request gets its first token, which the prompt's last program draws, at once.
        """
        is_first = self.drawer.piece is not None
        return not (is_first or self.is_ended) and self.error is None and self.is_finite

    def __add__(self, later: Received) -> Received:
        """The tokens of this and of a later program."""
        new, programs = self.new + later.new, self.programs + later.programs
        return Received(later.drawer, new, later.is_ended, later.error, programs)

    def follow(self) -> None:
        """Lets the matcher of the row's constraint, if any, follow the tokens."""
        matcher = self.row.owner.settings.matcher
        if matcher is not None and self.is_finite:
            try:
                matcher.advance(self.new.tokens)
            except ValueError as error:
                self.error = error


class Untold:
    """Tokens of constrained steps of many rows, which requests get after several steps.

    Passing a row's tokens to its request takes about as long for several tokens as for one. With
    many rows, that is longer than a step of the model.
    """

    def __init__(self) -> None:
        self._received: dict[Row, Received] = {}

    def add(self, found: Sequence[Received]) -> None:
        """Adds the tokens of a program."""
        for one in found:
            before = self._received.get(one.row)
            self._received[one.row] = one if before is None else before + one

    def may_wait(self, pending: Pending | None, steps: int) -> bool:
        """Whether all tokens may wait for the next program, drawn with the same weights.

        pending: the program under way. steps: the most steps whose tokens requests get at once.
        """
        if pending is None or not pending.is_masked or len(pending.drawers) < MANY_ROWS:
            return False
        return all(
            it.goes_on and it.programs < steps and it.new.weights == pending.weights
            for it in self._received.values()
        )

    def take(self) -> list[Received]:
        """Pops the tokens of rows that still have their slot."""
        found, self._received = self._received, {}
        return [one for one in found.values() if one.drawer.is_current]


def run_of(pending: Pending, begin: float, seconds: float) -> ProgramRun:
    """The ProgramRun of a program that has ended."""
    plan = pending.plan
    rows = sum(it.piece is None or it.piece.is_last for it in pending.drawers)
    steps = 0 if isinstance(plan, Extend) else steps_of(pending)
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


def steps_of(pending: Pending) -> int:
    """The steps of a decoding program; with speculation, those of the row with the most.

    With speculation the loop ends early if a row has the most tokens, or if all rows end.
    """
    assert isinstance(pending.plan, Decode)
    done = pending.results.speculated
    return pending.plan.steps if done is None else int(np.asarray(done.steps).max())


def drafts_of(proposal: Proposal | None) -> list[list[int]] | None:
    """Each row's proposed tokens, on the host; waits for them. None without a proposal."""
    if proposal is None:
        return None
    tokens, counts = np.asarray(proposal.tokens), np.asarray(proposal.counts)
    return [own[:count].tolist() for own, count in zip(tokens, counts, strict=True)]


def top_of(
    arrays: Sequence[np.ndarray], index: int, count: int, number: int
) -> list[list[tuple[int, float]]]:
    """The `number` likeliest ids of a row's first `count` tokens, and their log-probabilities.

    arrays: top_logprobs of a Drawn, on the host. index: the row's.
    """
    pairs = zip(*(x[index, :count, :number].tolist() for x in arrays), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def keep_scores(pending: Pending) -> None:
    """Adds the log-probabilities of prompt tokens and forced ones to their requests."""
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
        if handle.prompt_logprobs is not None and not piece.forced:
            continue  # the row is prefilled again
        request.scores = [s for s in request.scores if s.start < piece.start]
        request.scores.append(Scores(piece.start, logprobs, *top))
        if piece.is_last and not piece.forced:
            handle.prompt_logprobs = PromptLogprobs.join(
                request.scores, len(handle.prompt), request.settings.top_logprobs
            )


def keep_captured(pending: Pending) -> None:
    """Adds the activations that a program has captured, if any, to its requests.

    Rejected proposed tokens, which come after the counted ones, are left out.
    """
    if (arrays := pending.results.captured) is None:
        return
    captured = jax.tree.map(np.asarray, arrays)
    (_, _, counts, _), at = pending.results.arrays, 0
    for drawer in pending.drawers:
        piece, row = drawer.piece, drawer.row
        if piece is None:
            start, place, begin, count = len(row.tokens) - 1, drawer.index, 0, counts[drawer.index]
        else:
            start, place, begin, count = piece.start, 0, at, piece.end - piece.start
            at += count
        if drawer.is_current:
            own = jax.tree.map(
                lambda x, i=place, n=begin, m=begin + count: x[i, n:m].copy(), captured
            )
            row.owner.handle.parts.add(start, own)
