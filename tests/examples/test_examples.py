"""The examples run, and print what they are there to show."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("adapters.py", "step 23: loss"),
        ("generate.py", "--- sampled"),
        ("kernels.py", "uint4:g128"),
        ("modules.py", "the sequences have [17, 10] tokens"),
    ],
)
def test_example(name, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert shown in capsys.readouterr().out
