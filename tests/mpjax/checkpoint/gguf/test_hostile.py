"""Hostile GGUF files, drawn at random: each is opened or refused in a sentence, and no more."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from mpjax.checkpoint import huggingface
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.errors import CheckpointError
from tests.mpjax.bad_files.ways import bounds
from tests.mpjax.checkpoint.gguf.hostile import Hostile
from tests.sweeps import in_fuzz


def open_all(path: Path, size: int) -> str:
    """How it went to read all but the numbers; the header takes memory of the file's size."""
    source, header = GGUFSource(path), False
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        try:
            header = source.header is not None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 2**20 + 10 * size
        huggingface.open_headers(source)
        source.read_tokenizer().encode("hello")
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message.encode()) < 2000
        assert str(path) in message or "model." in message or "lm_head" in message
        return "refused after its header" if header else "refused in its header"
    return "opened"


@pytest.mark.parametrize(
    ("count", "is_mixture"),
    [(50, False), (30, True), *map(in_fuzz, (80_000, 20_000), (False, True))],
)
def test_hostile_files(count, is_mixture, tmp_path):
    path, hostile = tmp_path / "a.gguf", Hostile(count, is_mixture=is_mixture)
    found: Counter[str] = Counter()
    path.write_bytes(hostile.sound)
    tracemalloc.start()
    try:
        assert open_all(path, len(hostile.sound)) == "opened"
        for _ in range(count):
            path.write_bytes(data := hostile.draw())
            with bounds():
                found[open_all(path, len(data))] += 1
    finally:
        tracemalloc.stop()
    assert len(found) == 3, "some are opened, and some refused at either place"
