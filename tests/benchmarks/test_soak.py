from __future__ import annotations

import json

import jax
import numpy as np

from benchmarks import soak
from tests.mpjax.conftest import tiny, tiny_folder
from tests.mpjax.engine.conftest import make_engine

__all__ = ["tiny", "tiny_folder"]

CLEAN = {"pages": 9, "free_pages": 9, "running": 0, "waiting": 0, "programs": 15}


def test_traffic_leaves_an_engine_as_it_was(monkeypatch, tiny):
    monkeypatch.setattr(soak, "ROUND", 8)
    with make_engine(tiny) as engine:
        found = soak.soak(engine, 1, exact=True)
    assert found["rounds"] == 1
    assert found["faults"] == []
    assert found["differ"] == 0
    assert found["new_tokens"] > 8


def test_faults_are_sentences():
    assert soak.faults(CLEAN, 0, 0) == []
    wrong = {"pages": 9, "free_pages": 7, "running": 1, "waiting": 2, "programs": 16}
    assert soak.faults(wrong, 65 << 20, 3) == [
        "2 pages are lost",
        "1 requests run and 2 wait, and none is left",
        "16 programs were compiled, above 15",
        "the process, or what it has on the device, has grown by 65 MiB",
        "3 requests say something else when they are repeated",
    ]


def test_a_fault_ends_the_rounds(monkeypatch, capsys, tmp_path):
    class Idle:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def statistics(self):
            return CLEAN | {"new_tokens": 0}

    monkeypatch.setattr(soak, "make_engine", lambda **how: Idle())
    monkeypatch.setattr(soak, "run_round", lambda engine, rng: 2)
    assert soak.main(["100"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["differ"]) == (1, 2)
    said = []
    monkeypatch.setattr(Idle, "statistics", lambda _: CLEAN | {"new_tokens": 50 * len(said)})
    monkeypatch.setattr(soak, "run_round", lambda engine, rng: said.append(None) or 0)
    output = tmp_path / "soak.json"
    assert soak.main(["90", "--large", "--ride", "--slots", "9", "--output", str(output)]) == 0
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["rounds"] == 2
    assert written["versions"]["jax"] == jax.__version__
    assert len(said) == 2


def test_requests_are_of_many_kinds(tiny):
    rng = np.random.default_rng(0)
    with make_engine(tiny) as engine:
        found = [soak.ask(rng, engine, range(100, 292)) for _ in range(60)]
    assert {one.is_greedy for one in found} == {True, False}
    assert {one.options.get("logprobs") for one in found} == {None, 3}
    longest = max(len(one.prompt) + one.options["max_new_tokens"] for one in found)
    assert 100 < longest <= engine.max_tokens
    assert sum(one.prompt[0] == 100 for one in found) > 10
