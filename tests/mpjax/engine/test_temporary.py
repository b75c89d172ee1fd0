"""The engine of one call: its sizes, its memory, and the programs that calls share."""

from __future__ import annotations

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import Sampling
from mpjax.engine import call as call_module
from mpjax.engine import temporary
from mpjax.engine.calls import count_programs
from mpjax.errors import NotFiniteError
from mpjax.generation import decoding
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from tests.mpjax.odd_models import with_damaged_token

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPTS = ["def f(x):\n    return", "import", "class Stack(list):\n    "]
HOT = Sampling(temperature=1.2)
NEW = 16


@pytest.fixture(scope="module")
def three(tiny):
    """A generation of the three prompts, in a batch of four rows."""
    return mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling=HOT, seeds=[1, 2, 3])


def test_sizes_of_a_bucket_share_all_programs(tiny, three, caplog):
    """Not only prefill and decoding: what is done around them, too."""
    with jax.log_compiles():
        found = mpjax.generate(
            tiny, ["x", *PROMPTS], max_new_tokens=9, sampling=HOT, seeds=[9, 1, 2, 3]
        )
        compiled = [record.message for record in caplog.records if "Compiling" in record.message]
        assert not compiled
        jnp.zeros(1234).block_until_ready()
    assert "Compiling" in caplog.text, "nothing was logged: find another way to see it"
    assert found.tokens[1:] == [row[:9] for row in three.tokens]


def test_padding_rows_change_nothing(tiny):
    """The same tokens as without any; log-probabilities but for the order of sums."""
    prompts = [*PROMPTS, "x = 1", "for i in"]
    temperature = np.asarray([0.0, 1.2, 0.7, 0.0, 2.0])
    sampling = Sampling(temperature=temperature, top_k=50, repetition_penalty=1.1)
    found = mpjax.generate(tiny, prompts, max_new_tokens=NEW, sampling=sampling)
    ids = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    padded = np.zeros((5, 16), np.int32)
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    expected = decoding.generate_tokens(
        tiny.model,
        padded,
        np.asarray([len(tokens) for tokens in ids]),
        max_new_tokens=NEW,
        sampling=dataclasses.replace(sampling, stop_ids=tiny.tokenizer.stop_ids),
        kv_format=tiny.kv_format,
    )
    lengths = expected.lengths.tolist()
    rows = expected.tokens.tolist()
    assert found.tokens == [row[:n] for row, n in zip(rows, lengths, strict=True)]
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, other[: len(mine)], rtol=1e-4)


def test_slots_for_more_prompts_are_left_out_where_there_is_no_memory(tiny, monkeypatch):
    lm, needed = dataclasses.replace(tiny, page_size=64), {}
    whole = temporary.needed_bytes

    def watched(lm, sizes, *rest):
        needed[sizes.slots] = whole(lm, sizes, *rest)
        return needed[sizes.slots]

    def slots():
        with temporary.temporary_engine(lm, [9, 9, 9], 20) as engine:
            return engine.slots

    monkeypatch.setattr(temporary, "needed_bytes", watched)
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: 10**12)
    assert slots() == 4
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: needed[4] - 1)
    assert slots() == 3
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: needed[3] - 1)
    with pytest.raises(DeviceMemoryError, match=r"a KV16 cache for 3 × 48 tokens, with prefill"):
        slots()


def test_a_cache_that_is_too_large_is_refused_before_it_is_allocated(tiny, monkeypatch):
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: 10_000)
    monkeypatch.setattr("mpjax.engine.runner.create_state", lambda *sizes: 1 / 0)
    lm = dataclasses.replace(tiny, kv_format=KVFormat(8))
    with pytest.raises(DeviceMemoryError, match="a KV8 cache for 2 × 144 tokens, with prefill"):
        mpjax.generate(lm, ["x", "y"])


def test_no_memory_is_kept_after_a_call(tiny):
    def arrays():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    mpjax.generate(tiny, PROMPTS, max_new_tokens=3)
    before = arrays()
    mpjax.generate(tiny, PROMPTS, max_new_tokens=3)
    stream = mpjax.stream(tiny, PROMPTS[0], max_new_tokens=9)
    next(stream)
    stream.close()
    assert arrays() == before


def test_a_short_generation_has_two_programs(tiny):
    """One that reads the prompt, and one that decodes, also for rows of different settings."""
    different = [{"temperature": 1.0, "top_p": 0.9}, *[{"min_new_tokens": 0}] * 4]
    for sampling in (None, different):
        before = count_programs()
        prompts = [[5] * 61, *[[6] * 3] * 4]
        mpjax.generate(tiny, prompts, max_new_tokens=40, sampling=sampling)
        assert 0 < count_programs() - before <= 2
        before = count_programs()
        mpjax.generate(tiny, [[7] * 50] * 5, max_new_tokens=36, sampling=sampling)
        assert count_programs() == before


def test_compiling_ends_before_the_first_token(tiny):
    """So that the seconds of decoding, and tokens per second, are without it."""
    lm, before = dataclasses.replace(tiny, page_size=32), count_programs()
    pieces = mpjax.stream(lm, PROMPTS[0], max_new_tokens=40, sampling=HOT)
    next(pieces)
    first = count_programs()
    assert first > before
    assert len(list(pieces)) > 1
    assert count_programs() == first


def test_each_prompt_may_have_a_sampling_of_its_own(tiny, three):
    """In a call, in an engine and in the loop on arrays: the rows are those of other calls."""
    each = [HOT, {"temperature": 0}, Sampling(temperature=1.2, top_k=1, stop_ids=())]
    greedy = mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling={"temperature": 0})
    found = mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling=each, seeds=[1, 2, 3])
    assert found.tokens[0] == three.tokens[0]
    assert found.tokens[1:] == greedy.tokens[1:]
    with mpjax.Engine(tiny, slots=2, max_tokens=64) as engine:
        again = engine.generate(PROMPTS, max_new_tokens=NEW, sampling=each, seeds=[1, 2, 3])
    assert again.tokens == found.tokens
    pieces = mpjax.stream_batch(tiny, PROMPTS, max_new_tokens=NEW, sampling=each, seeds=[1, 2, 3])
    texts = [""] * 3
    for piece in pieces:
        texts[piece.row] += piece.text
    assert texts == found.text
    with pytest.raises(ValueError, match="sampling has 2 entries for a batch of 3"):
        mpjax.generate(tiny, PROMPTS, sampling=each[:2])


def test_time_between_pieces_is_not_decoding(tiny, monkeypatch):
    now = 0.0
    monkeypatch.setattr(call_module.time, "perf_counter", lambda: now)
    stream = mpjax.stream(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT)
    returned = []

    def watched():
        returned.append((yield from stream))

    for _ in watched():
        now += 1000
    assert now >= 2000
    assert [(found.prefill_seconds, found.decode_seconds) for found in returned] == [(0, 0)]


def test_no_row_is_read_past_a_number_that_is_none(tiny, three):
    """In the prompt, and among new tokens; rows are counted as the prompts are."""
    lm = with_damaged_token(tiny, tiny.tokenizer.encode(PROMPTS[1])[0])
    with pytest.raises(NotFiniteError, match=r"^prompt 1: the model computes NaN") as e:
        mpjax.generate(lm, PROMPTS, max_new_tokens=NEW, sampling=HOT, seeds=[1, 2, 3])
    assert e.value.row == 1
    place = next(
        place
        for place, token in enumerate(three.tokens[2])
        if place > 2
        and not any(token in row for row in (*three.tokens[:2], three.tokens[2][:place]))
    )
    lm = with_damaged_token(tiny, three.tokens[2][place])
    options = {"sampling": HOT, "seeds": [1, 2, 3]}
    found = mpjax.generate(lm, PROMPTS, max_new_tokens=place + 1, **options)
    assert found.tokens == [row[: place + 1] for row in three.tokens]
    with pytest.raises(NotFiniteError, match=r"^prompt 2: .* in float32, .* weights are damaged"):
        mpjax.generate(lm, PROMPTS, max_new_tokens=place + 2, **options)


def test_a_request_of_no_new_tokens_scores_its_prompt(tiny):
    """The last token is scored and not read, so a prompt may have one more than positions."""
    prompt = tiny.tokenizer.encode(PROMPTS[0])
    scored = {"prompt_logprobs": True, "max_new_tokens": 0}
    with mpjax.Engine(tiny, slots=2, max_tokens=len(prompt) - 1) as engine:
        handle, alone = engine.submit(prompt, **scored), engine.submit(prompt[:1], **scored)
        assert (handle.result().tokens, handle.finish_reason) == ([], "length")
        assert len(handle.prompt_logprobs.logprobs) == len(prompt) - 1
        assert len(alone.result().prompt_logprobs.logprobs) == 0
        with pytest.raises(ValueError, match="max_new_tokens is 0: expected at least one"):
            engine.submit(prompt[:2], max_new_tokens=0)
    with mpjax.Engine(tiny, slots=1, max_tokens=64) as engine:
        expected = engine.submit(prompt, prompt_logprobs=True, max_new_tokens=1).result()
    np.testing.assert_allclose(
        handle.prompt_logprobs.logprobs, expected.prompt_logprobs.logprobs, rtol=1e-4
    )
