"""ProgramRun: what an observer of an engine learns about a program; and its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpjax.engine.planner import Piece
from mpjax.engine.row import Row


@dataclasses.dataclass(frozen=True)
class ProgramRun:
    """The size and time of a program that an engine has run.

    kind: "read" for prefill, "decode" for decoding.
    size: padded number of prefill tokens or of decoding rows. tokens: prefill tokens, without
        padding. rows: rows that draw tokens. steps: decoding steps; 0 for prefill.
    context: tokens that the queries attend to, in the row with the most.
    begin: start on the device, in seconds of `time.perf_counter`, as seen from the host.
    seconds: its duration. is_measured: whether that is the device's time; else the host was late or
        compiled, and `seconds` is too long.
    """

    kind: str
    size: int
    tokens: int
    rows: int
    steps: int
    context: int
    begin: float
    seconds: float
    is_measured: bool

    def trace_event(self, since: float) -> dict[str, Any]:
        """The program as an event in the Trace Event Format, for Perfetto.

        since: the zero of the trace's time, in seconds of `time.perf_counter`.
        """
        shown = f"read {self.tokens}" if self.kind == "read" else f"decode {self.rows}"
        return {
            "name": f"{shown} in {self.size}",
            "cat": self.kind,
            "ph": "X",
            "ts": (self.begin - since) * 1e6,
            "dur": self.seconds * 1e6,
            "pid": 1,
            "tid": 1,
            "args": dataclasses.asdict(self),
        }


class Drawer:
    """A row in a launched program.

    index: the row's index in the results. runs: `row.runs` at launch. piece: the row's prefill
    chunk; None in a decoding program.
    """

    def __init__(self, index: int, row: Row, piece: Piece | None = None) -> None:
        self.index, self.row, self.runs, self.piece = index, row, row.runs, piece

    @property
    def is_current(self) -> bool:
        """Whether the row still has the slot: not if it was cancelled, or preempted and waits."""
        return self.row.slot is not None and self.row.runs == self.runs
