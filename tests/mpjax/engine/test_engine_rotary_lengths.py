"""Engines over models whose rotary frequencies depend on the tokens of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mpjax
from mpjax.engine.engine import Engine
from mpjax.kernels import KVFormat
from tests.mpjax.engine.conftest import require_order, resize
from tests.mpjax.rotary_lengths import KINDS, NEW, ORIGINAL, model_of, prompts, said, said_alone


def engine_of(kind: str, **options: Any) -> Engine:
    lm = mpjax.LanguageModel(model_of(kind), None, KVFormat(16), Path(), 16)
    options = {"slots": 3, "max_tokens": 80, "chunk_tokens": 64, "steps": 4} | options
    return Engine(lm, **options)


def served(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}
    handles = [engine.submit(row, **options) for row in rows]
    while engine.has_work:
        engine.step()
        require_order(engine._runner.planner)
    return [handle.tokens for handle in handles]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"chunk_tokens": 8}, {"speculate": mpjax.Ngram(3, 1)}],
    ids=["chunks", "speculation"],
)
def test_rows_say_what_they_say_alone(kind, options):
    with engine_of(kind, **options) as engine:
        assert served(engine, prompts()) == said_alone(kind)
        shared = engine.statistics()["shared_tokens"]
        # The second prompt begins as the last, which is shorter: only LongRoPE rotates them alike.
        assert (shared > 0) == (kind == "longrope")
        assert served(engine, prompts()[::-1]) == said_alone(kind)[::-1]
        assert engine.statistics()["shared_tokens"] > shared
        resize(engine, pages=8)
        assert served(engine, prompts()) == said_alone(kind)
        assert engine.statistics()["preemptions"] > 0


def test_rows_share_no_pages_with_other_factors():
    short = prompts()[2]
    long = [*short, *said_alone("longrope")[2][:ORIGINAL]]
    with engine_of("longrope") as engine:
        for row, shared in ((short, 0), (long, 0), (short, 16), (long, 16 + 32)):
            handle = engine.submit(row, max_new_tokens=2, sampling={"stop_ids": ()})
            assert handle.result().tokens == said(model_of("longrope"), [row], 2)[0]
            assert engine.statistics()["shared_tokens"] == shared
