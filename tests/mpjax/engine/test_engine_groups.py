"""Engines over models whose layers have windows or none: each group has pages of its own."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine import pages as pages_module
from mpjax.engine.engine import Engine
from mpjax.engine.pages import NOWHERE
from mpjax.kernels import KVFormat
from tests.models.small import small_config, small_model
from tests.mpjax.engine.conftest import require_order, resize
from tests.mpjax.odd_models import with_damaged_token

NEW = 40
PROMPTS = [np.random.default_rng(n).integers(0, 50, 60 + 30 * n).tolist() for n in range(3)]


@pytest.fixture(scope="module")
def lm() -> mpjax.LanguageModel:
    model = small_model(small_config(windows=(24, None, 24, 40)))
    return mpjax.LanguageModel(model, None, KVFormat(16), Path(), 16)


@pytest.fixture(scope="module")
def alone(lm) -> list[list[int]]:
    tokens = np.zeros((3, len(PROMPTS[-1])), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in PROMPTS])
    found = mpjax.generate_tokens(lm.model, tokens, lengths, max_new_tokens=NEW)
    return found.tokens.tolist()


def test_windows_free_pages_and_change_nothing(lm, alone, monkeypatch):
    """Also where pages are few, rows are preempted, and prefixes are shared."""
    monkeypatch.setattr(pages_module, "WINDOW_SLACK", 16)  # kernels run as plain JAX here
    assert lm.config.page_groups == (24, None, 40)
    with Engine(lm, slots=3, max_tokens=192, chunk_tokens=32, steps=4) as engine:
        for pages in (25, 13):
            resize(engine, pages=pages)
            for _ in range(2):  # the second time with shared pages
                handles = [engine.submit(p, max_new_tokens=NEW) for p in PROMPTS]
                held = []
                while engine.has_work:
                    engine.step()
                    require_order(engine._runner.planner)
                    for row in engine._runner.planner.running:
                        held.append([sum(p != NOWHERE for p in own) for own in row.pages])
                assert [handle.tokens for handle in handles] == alone
            most = np.max(held, axis=0)
            assert most[1] == -(-(len(PROMPTS[-1]) + NEW) // 16)
            assert most[0] < most[1] - 1
            assert most[0] <= most[2] < most[1]
        numbers = engine.statistics()
        assert numbers["preemptions"] > 0
        assert numbers["shared_tokens"] > 0
        assert numbers["free_pages"] == numbers["pages"]


def test_a_long_prompt_that_is_not_finite_ends(lm, monkeypatch):
    """At its first piece: pages of windows that it still held would leave no room for the next."""
    monkeypatch.setattr(pages_module, "WINDOW_SLACK", 16)
    damaged = with_damaged_token(lm, 49)
    good = [token % 49 for token in PROMPTS[0]]
    with Engine(damaged, slots=1, max_tokens=192, chunk_tokens=32, steps=4) as engine:
        expected = engine.submit(good, max_new_tokens=8).result().tokens
        handle = engine.submit([1, 2, 49, *good, *good], max_new_tokens=8)
        for _ in range(20):
            engine.step()
        assert handle.finish_reason == "error"
        assert engine.submit(good, max_new_tokens=8).result().tokens == expected
