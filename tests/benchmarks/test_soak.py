from __future__ import annotations

from benchmarks import soak
from tests.mpjax.conftest import tiny, tiny_folder
from tests.mpjax.engine.conftest import make_engine

__all__ = ["tiny", "tiny_folder"]


def test_traffic_leaves_an_engine_as_it_was(monkeypatch, tiny):
    monkeypatch.setattr(soak, "ROUND", 8)
    with make_engine(tiny) as engine:
        found = soak.soak(engine, 1, exact=True)
    assert found["rounds"] == 1
    assert found["faults"] == []
    assert found["differ"] == 0
    assert found["new_tokens"] > 8


def test_faults_are_sentences():
    clean = {"pages": 9, "free_pages": 9, "running": 0, "waiting": 0, "programs": 15}
    assert soak.faults(clean, 0, 0) == []
    wrong = {"pages": 9, "free_pages": 7, "running": 1, "waiting": 2, "programs": 16}
    assert soak.faults(wrong, 65 << 20, 3) == [
        "2 pages are lost",
        "1 requests run and 2 wait, and none is left",
        "16 programs were compiled, above 15",
        "the process, or what it has on the device, has grown by 65 MiB",
        "3 requests say something else when they are repeated",
    ]
