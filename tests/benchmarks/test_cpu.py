from __future__ import annotations

import argparse

import pytest

from benchmarks import cpu


def test_systems_take_turns_and_must_draw_all_tokens():
    calls = []

    def counting(name, tokens=3):
        return lambda batch, wanted: calls.append((name, batch)) or batch * tokens

    systems = {"mpjax": counting("mpjax"), "llama.cpp": counting("llama.cpp")}
    found = {name: {"batches": {}} for name in systems}
    options = argparse.Namespace(rounds=2, tokens=3)
    cpu.measure(systems, 1, options, found)
    assert calls == [("mpjax", 1), ("llama.cpp", 1)] * 3
    calls.clear()
    cpu.measure(systems, 8, options, found)
    assert calls == [("mpjax", 8)] * 3  # the other has no batches
    assert {name: [*each["batches"]] for name, each in found.items()} == {
        "mpjax": ["1", "8"],
        "llama.cpp": ["1"],
    }
    with pytest.raises(AssertionError, match="mpjax"):
        cpu.measure({"mpjax": counting("mpjax", tokens=2)}, 1, options, found)
