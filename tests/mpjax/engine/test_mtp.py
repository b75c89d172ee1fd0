"""An engine whose model proposes by its own head says what a plain one says."""

from __future__ import annotations

import dataclasses
import re

import pytest

import mpjax
from mpjax.kernels import KVFormat
from tests.models.small import mtp_model
from tests.mpjax.engine.conftest import make_engine, require_order, resize
from tests.mpjax.generation.speculation.test_mtp import agreeing, eagle
from tests.mpjax.generation.speculation.test_states import NEW, TEXTS
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.mark.parametrize(
    ("spelled", "kv", "constrained"),
    [("mtp", "KV8", False), ("eagle", "KV16", False), in_sweep("eagle", "KV8", True)],
)
def test_an_engine_speculates_where_rows_come_go_and_are_read_again(tiny, spelled, kv, constrained):
    """Also behind shared prefixes, and for a row with a constraint."""
    vocabulary = tiny.config.vocab_size
    if spelled == "mtp":
        model = agreeing(mtp_model(vocab_size=vocabulary), 0.3)
    else:
        model = eagle(tokens=vocabulary, vocab_size=vocabulary)
    lm = dataclasses.replace(tiny, model=model, kv_format=KVFormat(16))
    common = [1 + i * i % 29 for i in range(40)]
    words = mpjax.Regex("([a-z]{1,5} ){3,}")
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 0, "stop_ids": ()}}
    asked = [(common + text, {}) for text in TEXTS[:2]]
    if constrained:
        asked.append((asked[0][0], {"constraint": words}))
    sizes = {"slots": 2, "chunk_tokens": 16, "text": kv}
    with make_engine(lm, **sizes) as engine:
        plain = [engine.submit(text, **options, **how).result() for text, how in asked]
    with make_engine(lm, speculate=spelled, **sizes) as engine:
        resize(engine, pages=5)
        handles = [engine.submit(text, **options, **how) for text, how in asked * 2]
        while engine.has_work:
            engine.step()
            require_order(engine._runner.planner)
        for handle, expected in zip(handles, plain * 2, strict=True):
            assert handle.tokens == expected.tokens
        numbers = engine.statistics()
    assert numbers["preemptions"] > 0
    assert numbers["shared_tokens"] > 0
    assert NEW // 2 < numbers["accepted_tokens"] < numbers["proposed_tokens"]
    assert not constrained or re.match("[a-z]{1,5}", handles[2].text)


def test_a_row_is_proposed_the_same_wherever_its_prompt_was(tiny):
    """Read at once or in pieces, and shared with an earlier row that went on in another way."""
    model = agreeing(mtp_model(vocab_size=tiny.config.vocab_size), 0.3)
    lm = dataclasses.replace(tiny, model=model)
    prompt = [1 + i * i % 29 for i in range(70)]
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 0, "stop_ids": ()}}
    counts = []
    for before, chunk in (((), 80), ((), 16), (([*prompt[:64], 3, 5, 7, 2, 8],), 16)):
        with make_engine(lm, speculate="mtp", chunk_tokens=chunk) as engine:
            for text in before:
                engine.submit(text, **options).result()
            found = engine.submit(prompt, **options).result()
            assert (found.shared_tokens > 0) == bool(before)
            counts.append([found.speculation.proposed, found.speculation.accepted])
    assert counts[0] == counts[1] == counts[2]
