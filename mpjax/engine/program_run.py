"""The report of a program that an engine has run."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ProgramRun:
    """A program that an engine has run.

    kind: "read" for one that reads prompts, "decode" for one that decodes.
    size: tokens that it reads, or rows that decode, with padding. tokens: of prompts that it reads.
    rows: that draw tokens. steps: of decoding; 0 for one that reads.
    context: tokens that the queries attend to, of the row with the most.
    begin: when the device began it, in seconds of `time.perf_counter`, as far as the host sees.
    seconds: that it took. is_measured: whether those are the device's; else the host came late, or
        compiled, and they are more.
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
        """The program as an event of the Trace Event Format, which Perfetto shows.

        since: the time that is zero there.
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
