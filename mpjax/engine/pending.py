"""Programs that an engine has launched, and whose results the host has not read."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from mpjax.engine.choosing import Forwarded
from mpjax.engine.planner import Decode, Extend
from mpjax.engine.program_run import Drawer, ProgramRun
from mpjax.engine.programs import Drawn, PromptScores, Stepping


@dataclasses.dataclass(eq=False)
class Pending:
    """A launched program whose results the host has not read.

    drawn, scores: its results, on the device. begin: launch time. size: padded number of prefill
    tokens or of decoding rows. context: tokens that its queries attend to, in the row with the
    most. is_measured: whether its launch and end give its duration on the device. forwarded: for a
    constrained step, the results of `forward`; `drawn` is that of `choose`.
    weights: the version of the weights.
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

    @property
    def results(self) -> Drawn:
        """The drawn tokens."""
        assert self.drawn is not None, "the second program has not been started"
        return self.drawn

    def fetch(self) -> None:
        """Begins to copy the results to the host, so that reading them later waits only once."""
        results = self.results
        wanted = results.arrays, results.speculated, results.captured, self.scores
        for array in jax.tree.leaves(wanted):
            array.copy_to_host_async()


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


def keep_captured(pending: Pending) -> None:
    """Adds the activations that a program has captured, if any, to its requests.

    Rejected proposed tokens, which come after the counted ones, are left out.
    """
    if (arrays := pending.results.captured) is None:
        return
    captured = jax.tree.map(np.asarray, arrays)
    counts, at = np.asarray(pending.results.counts), 0
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
