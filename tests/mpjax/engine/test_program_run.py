from __future__ import annotations

import dataclasses

import pytest

from mpjax.engine.program_run import ProgramRun

pytestmark = pytest.mark.any_version


def test_a_program_is_an_event_of_a_trace():
    """In microseconds since the first one, by what it read or how many rows it decoded."""
    read = ProgramRun("read", 64, 60, 1, 0, 60, 12.5, 0.25, is_measured=True)
    decoded = ProgramRun("decode", 4, 0, 3, 8, 69, 12.75, 0.5, is_measured=False)
    first, second = (run.trace_event(12.5) for run in (read, decoded))
    assert (first["name"], first["cat"], first["ph"]) == ("read 60 in 64", "read", "X")
    assert (first["ts"], first["dur"]) == (0, 0.25e6)
    assert (second["name"], second["ts"], second["dur"]) == ("decode 3 in 4", 0.25e6, 0.5e6)
    assert second["args"] == dataclasses.asdict(decoded)
