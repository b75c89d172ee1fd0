from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpjax
from mpjax import Sampling
from mpjax.engine.calls import count_programs
from mpjax.engine.engine import Engine
from mpjax.engine.handle import CancelledError
from mpjax.errors import NotFiniteError
from mpjax.kernels import KVFormat
from tests.eight_devices import run
from tests.models.small import small_config, small_model
from tests.mpjax.engine.conftest import (
    Knowing,
    is_clean,
    make_engine,
    resize,
    said_alone,
)
from tests.mpjax.odd_models import with_damaged_token
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPTS = ["def f(x):\n    return", "import", "class Stack(list):\n    ", "for i in range(9):"]
NEW = 16
HOT = Sampling(temperature=1.2)


@pytest.fixture(scope="module")
def alone(tiny):
    """What `generate` says, greedily."""
    return mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW)


def test_it_generates_what_generate_does(engine, alone):
    found = engine.generate(PROMPTS, max_new_tokens=NEW)
    assert found.tokens == alone.tokens
    assert found.text == alone.text
    assert found.finish_reasons == alone.finish_reasons
    assert found.prompt_tokens == alone.prompt_tokens
    for one, other in zip(found.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert is_clean(engine)


def test_rows_that_are_drawn_in_other_ways_run_together(engine, tiny):
    sampling = Sampling(
        temperature=[0, 1.2, 0.8, 1.0],
        top_k=[1, 9999, 20, 9999],
        top_p=[1, 1, 0.9, 1],
        min_p=[0, 0, 0, 0.02],
        repetition_penalty=[1.5, 1, 1, 1.2],
        min_new_tokens=[0, 3, 0, NEW],
    )
    options: dict[str, Any] = {"max_new_tokens": NEW, "seeds": [3, 5, 7, 11], "stop": ["e", "t"]}
    expected = mpjax.generate(tiny, PROMPTS, sampling=sampling, **options)
    assert {*expected.finish_reasons} == {"stop", "length"}
    found = engine.generate(PROMPTS, sampling=sampling, **options)
    assert found.tokens == expected.tokens
    assert found.text == expected.text
    assert found.finish_reasons == expected.finish_reasons


# A format, and whether decoding speculates.
TRACED = [("KV4cg32", False)]
SWEPT = ("KV16", "KV8", "KV4", "KVfp8", "KV2g32", "K8V4cg32")
TRACED += [in_sweep(text, False) for text in SWEPT]
TRACED += [in_sweep(text, True) for text in ("KV8", "KV4cg32")]


@pytest.mark.parametrize(("text", "speculates"), TRACED)
def test_arrivals_sharing_and_preemption_change_nothing(text, speculates, tiny):
    """The greedy tokens are those of each prompt alone, whatever happens to it and beside it."""
    rng = np.random.default_rng(0)
    common = rng.integers(1, 2048, 134).tolist()
    prompts = [
        common[:length] + rng.integers(1, 2048, own).tolist()
        for length, own in ((0, 5), (130, 9), (134, 30), (40, 1), (134, 30), (70, 60))
    ]
    expected = said_alone(tiny, text, prompts, NEW)
    said = [prompt + new.tolist() for prompt, new in zip(prompts, expected, strict=True)]
    with make_engine(tiny, text, speculate=Knowing.of(said) if speculates else None) as engine:

        @settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(
            order=st.permutations(range(len(prompts))),
            pauses=st.lists(st.integers(0, 3), min_size=len(prompts), max_size=len(prompts)),
            chunk=st.sampled_from([16, 64]),
            slots=st.integers(2, 4),
            pages=st.integers(9, 25),
            cancelled=st.sampled_from([None, 0, 3]),
            gap=st.sampled_from([None, 0.001]),
        )
        def check(order, pauses, chunk, slots, pages, cancelled, gap):
            resize(engine, chunk=chunk, slots=slots, pages=pages, max_gap=gap)
            engine._runner.planner._slots = list(range(4))[:slots]
            handles = {}
            for number, pause in zip(order, pauses, strict=True):
                options = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}
                handles[number] = engine.submit(prompts[number], **options)
                for _ in range(pause):
                    engine.step()
            if cancelled is not None:
                handles[cancelled].cancel()
            for _ in engine:
                pass
            for number, handle in handles.items():
                if handle.finish_reason != "cancelled":
                    assert handle.tokens == expected[number].tolist(), number
                else:
                    assert number == cancelled
                    taken = len(handle.tokens)
                    assert handle.tokens == expected[number][:taken].tolist()
            assert is_clean(engine)

        check()
        numbers = engine.statistics()
        # Of 16 and 64 tokens, of 1 and 4 pieces or rows, and of 4 and 6 entries; and what clears.
        assert numbers["programs"] <= 13 + speculates
        assert (numbers["proposed_tokens"] > numbers["accepted_tokens"] > 50) == speculates


def test_a_chunk_longer_than_the_window_changes_nothing():
    """Two prompts, so that a page that is given back too early goes to the other."""
    model = small_model(small_config(windows=(64,), max_position_embeddings=700))
    lm = mpjax.LanguageModel(model, None, KVFormat(16), Path(), 32)
    prompts = np.random.default_rng(0).integers(1, 50, (2, 600)).astype(np.int32)
    lengths, options = [600, 600], {"max_new_tokens": 4, "sampling": {"stop_ids": ()}}
    expected = mpjax.generate_tokens(model, prompts, lengths, kv_format="KV16", **options)
    logprobs = np.asarray(jax.nn.log_softmax(model(prompts)[:, :-1]))
    chosen = np.take_along_axis(logprobs, prompts[:, 1:, None], -1)[..., 0]
    # Prompts that are scored are read a quarter of a chunk at a time.
    with Engine(lm, slots=2, max_tokens=640, chunk_tokens=4 * 400, steps=4) as engine:
        handles = [engine.submit(one.tolist(), prompt_logprobs=True, **options) for one in prompts]
        found = [handle.result() for handle in handles]
    assert [one.tokens for one in found] == np.asarray(expected.tokens).tolist()
    for one, scores in zip(found, chosen, strict=True):
        np.testing.assert_allclose(one.prompt_logprobs.logprobs, scores, atol=1e-3)


@pytest.mark.parametrize("tokens", [in_sweep(4000)])
def test_nothing_leaks_under_random_traffic(tokens, engine):
    """Many requests in a small cache, some of which are cancelled or end early."""
    resize(engine, pages=14)
    rng, handles, drawn = np.random.default_rng(1), [], 0
    common = rng.integers(1, 2048, 60).tolist()
    while drawn < tokens or engine.has_work:
        if drawn < tokens and rng.random() < 0.4:
            own = rng.integers(1, 2048, rng.integers(1, 90)).tolist()
            prompt = common[: rng.integers(0, 60)] + own
            sampling = HOT if rng.random() < 0.3 else None
            new = int(rng.integers(1, 40))
            handles.append(engine.submit(prompt, max_new_tokens=new, sampling=sampling))
        if handles and rng.random() < 0.05:
            handles[rng.integers(len(handles))].cancel()
        drawn += sum(len(event.tokens) for event in engine.step())
        handles = [handle for handle in handles if not handle.is_finished]
    assert not handles
    assert engine.statistics()["preemptions"] > 0
    assert is_clean(engine)
    resize(engine, pages=25)


def test_no_program_is_compiled_twice(engine):
    def run():
        for count in range(1, 5):
            engine.generate(PROMPTS[:count], max_new_tokens=5)
            engine.generate(PROMPTS[:count], max_new_tokens=7, sampling=HOT)
        return count_programs()

    assert run() == run()
    assert engine.statistics()["programs"] <= 15


def test_programs_are_compiled_ahead(engine, alone):
    """Also while requests run, of which nothing changes."""
    handle = engine.submit(PROMPTS[0], max_new_tokens=NEW)
    for _ in range(2):
        engine.step()
    engine.compile(greedy_only=True)
    before = count_programs()
    assert handle.result().text == alone.text[0]
    assert engine.generate(PROMPTS, max_new_tokens=NEW).text == alone.text
    assert count_programs() == before
    with pytest.raises(ValueError, match="greedy_only is 1: expected"):
        engine.compile(greedy_only=1)


def test_a_prompt_that_was_read_before_is_found(engine):
    prompt = list(range(1, 100))
    resize(engine)
    first = engine.submit(prompt, max_new_tokens=4).result()
    again = engine.submit(prompt, max_new_tokens=4).result()
    assert (first.shared_tokens, again.shared_tokens) == (0, 96)
    assert again.tokens == first.tokens
    np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-4)
    penalty = {"sampling": {"repetition_penalty": 1.5}, "max_new_tokens": 4}
    shared = engine.submit(prompt, **penalty).result()
    assert shared.shared_tokens == 96
    resize(engine)
    assert engine.submit(prompt, **penalty).result().tokens == shared.tokens


def test_pages_that_are_found_change_no_bit_where_the_pieces_are_the_same(engine):
    """Programs read 16 tokens each, also those that are found: so all sums have one order."""
    common, own = list(range(1, 65)), list(range(70, 126))
    found = []
    for first in (common + [9] * 20, [9] * 20):
        resize(engine, chunk=16)
        engine.submit(first, max_new_tokens=1).result()
        found.append(engine.submit(common + own, max_new_tokens=8).result())
    hit, miss = found
    assert (hit.shared_tokens, miss.shared_tokens) == (64, 0)
    assert (hit.tokens, hit.logprobs) == (miss.tokens, miss.logprobs)
    resize(engine, chunk=64)


def test_pieces_of_text_come_as_events_and_by_iterating(engine, alone):
    handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    texts = dict.fromkeys(handles, "")
    ends = {}
    for event in engine:
        texts[event.handle] += event.text
        if event.finish_reason:
            assert event.handle not in ends
            ends[event.handle] = event.finish_reason
    assert list(texts.values()) == alone.text
    assert [ends[handle] for handle in handles] == alone.finish_reasons
    pieces = list(engine.submit(PROMPTS[0], max_new_tokens=NEW))
    assert len(pieces) > 1
    assert "".join(pieces) == alone.text[0]


def test_it_runs_in_a_thread_for_asyncio(engine, alone):
    async def read(prompt):
        handle = engine.submit(prompt, max_new_tokens=NEW)
        return "".join([piece async for piece in handle])

    async def read_all():
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(read_all()) == alone.text
    assert engine.submit(PROMPTS[1], max_new_tokens=NEW).result().text == alone.text[1]
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(engine.generate(PROMPTS, max_new_tokens=NEW)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.stop()
    assert [one.text for one in found] == [alone.text] * 2
    assert is_clean(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_request_can_be_cancelled_at_any_point(engine, alone, steps):
    others = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[1:]]
    handle = engine.submit(PROMPTS[0], max_new_tokens=NEW)
    for _ in range(steps):
        engine.step()
    waiting = engine.statistics()["waiting"]
    handle.cancel()
    handle.cancel()
    assert engine.statistics()["waiting"] == waiting
    with pytest.raises(CancelledError, match=f"request {handle.number} was cancelled"):
        handle.result()
    assert handle.finish_reason == "cancelled"
    assert [one.result().text for one in others] == alone.text[1:]
    handle.cancel()
    assert is_clean(engine)


@pytest.mark.parametrize("text", ["KV16", in_sweep("KV4cg32")])
def test_nan_ends_its_own_row(text, tiny, alone):
    """And leaves nothing in the pages that the next row takes."""
    [bad] = {*range(1, 40)} - {i for row in alone.tokens for i in row} and [39]
    with make_engine(with_damaged_token(tiny, bad), text, cache_memory=2_000_000) as engine:
        resize(engine, pages=13)
        expected = engine.generate(PROMPTS, max_new_tokens=NEW)
        handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:2]]
        poisoned = engine.submit([5] * 140 + [bad, 7], max_new_tokens=NEW)
        with pytest.raises(NotFiniteError, match=f"request {poisoned.number}: .*NaN or infinite"):
            poisoned.result()
        assert poisoned.finish_reason == "error"
        assert [one.result().tokens for one in handles] == expected.tokens[:2]
        assert engine.generate(PROMPTS, max_new_tokens=NEW).tokens == expected.tokens
        assert engine.submit([5] * 160, max_new_tokens=4).result().finish_reason == "length"


def test_log_probabilities_of_a_prompt(engine, tiny):
    prompt = np.random.default_rng(0).integers(1, 2048, 90).tolist()
    handle = engine.submit(prompt, max_new_tokens=2, prompt_logprobs=True)
    beside = engine.submit(PROMPTS[0], max_new_tokens=4)
    found = handle.result().prompt_logprobs
    logits = np.asarray(tiny.model(np.array([prompt])))[0, :-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logprobs, np.array(prompt[1:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(found.logprobs, chosen, atol=1e-4)
    np.testing.assert_array_equal(found.best, logprobs.argmax(-1))
    np.testing.assert_allclose(found.best_logprobs, logprobs.max(-1), atol=1e-4)
    assert len(beside.result().tokens) == 4


def test_log_probabilities_of_the_likeliest_tokens(engine, tiny, alone):
    """Beside each new token and each of the prompt; the tokens stay what they are."""
    options = {"max_new_tokens": 4, "prompt_logprobs": True, "logprobs": 3}
    beside = engine.submit(PROMPTS[1], max_new_tokens=NEW)
    found = engine.submit(PROMPTS[0], **options).result()
    assert found.tokens == alone.tokens[0][:4]
    ids = [*found.prompt, *found.tokens]
    logprobs = np.asarray(jax.nn.log_softmax(tiny.model(np.array([ids]))))[0]
    order = np.argsort(-logprobs, axis=1)[:, :3]
    prompt, top = len(found.prompt), found.prompt_logprobs
    np.testing.assert_array_equal(top.top, order[: prompt - 1])
    np.testing.assert_array_equal(
        [[i for i, _ in one] for one in found.top_logprobs], order[prompt - 1 : -1]
    )
    expected = np.take_along_axis(logprobs, order, 1)
    np.testing.assert_allclose(top.top_logprobs, expected[: prompt - 1], atol=1e-4)
    logprobs = [[logprob for _, logprob in one] for one in found.top_logprobs]
    np.testing.assert_allclose(logprobs, expected[prompt - 1 : -1], atol=1e-4)
    assert beside.result().tokens == alone.tokens[1]
    assert beside.top_logprobs == []
    with pytest.raises(ValueError, match="logprobs is 21: expected the number of likeliest tokens"):
        engine.submit(PROMPTS[0], logprobs=21)
    with pytest.raises(ValueError, match=r"sampling is .*: expected a Sampling, or a mapping"):
        engine.submit(PROMPTS[0], sampling=[Sampling()])


def test_a_model_without_a_tokenizer_generates_ids(tiny, alone):
    lm = dataclasses.replace(tiny, tokenizer=None)
    with make_engine(lm) as engine:
        handle = engine.submit(tiny.tokenizer.encode(PROMPTS[0]), max_new_tokens=4)
        assert list(handle) == []
        assert handle.tokens == alone.tokens[0][:4]
        assert handle.text == ""
        with pytest.raises(ValueError, match="tokenizer"):
            engine.submit("a text")


def test_thousands_may_wait(engine):
    handles = [engine.submit([1 + i % 50], max_new_tokens=1) for i in range(2000)]
    for _ in range(4):
        engine.step()
    assert handles[0].is_finished
    for handle in handles[8:]:
        handle.cancel()
    for _ in engine:
        pass
    assert all(handle.is_finished for handle in handles)
    assert is_clean(engine)


def test_a_batch_that_fails_leaves_no_request_behind(engine):
    with pytest.raises(ValueError, match="150 tokens, and with 50 new ones"):
        engine.generate([[1] * 9, [1] * 150], max_new_tokens=50)
    before = engine.statistics()["new_tokens"]
    for _ in engine:
        pass
    assert engine.statistics()["new_tokens"] == before
    assert is_clean(engine)


@pytest.mark.sweep
def test_models_on_several_devices_are_served_alike():
    assert run("tests.mpjax.engine.on_devices") == "served\n"


def test_a_prompt_may_fill_all_tokens_of_a_request(engine, tiny):
    """Its one new token is never read."""
    prompt = list(range(3, 3 + engine.max_tokens))
    expected = mpjax.generate_tokens(tiny.model, [prompt], [192], max_new_tokens=1).tokens
    assert engine.submit(prompt, max_new_tokens=1).result().tokens == expected[0].tolist()
    with pytest.raises(ValueError, match="192 tokens, and with 2 new ones it would pass the 192"):
        engine.submit(prompt, max_new_tokens=2)
