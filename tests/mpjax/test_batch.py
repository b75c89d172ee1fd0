from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import Sampling, decoding
from mpjax import batch as module
from mpjax.finite import NotFiniteError
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


def test_padding_rows_generate_nothing(tiny, three, monkeypatch):
    """So that the loop ends as soon as all others have ended."""
    ends = [row[2] for row in three.tokens]
    monkeypatch.setattr(tiny.tokenizer, "stop_ids", tuple(ends))
    job = module.Job(PROMPTS, NEW, HOT, stop=(), seeds=[1, 2, 3], chat_template=None)
    [*_, batch] = module.run(tiny, job, watch=False)
    counts = [len(row.tokens) for row in batch.rows]
    assert max(counts) <= 3
    assert batch.state.counts.tolist() == [*counts, 0]
    assert int(batch.state.step) == max(counts)
    assert batch.state.cache.lengths.tolist()[3] == 1


def test_padding_rows_are_left_out_where_there_is_no_memory_for_them(tiny, monkeypatch):
    tiny = dataclasses.replace(tiny, page_size=64)
    sizes = {"padded": 16, "room": 32}
    needed = {rows: module._needed_bytes(tiny, rows, **sizes) for rows in (3, 4)}
    for free, rows in ((None, 4), (needed[4], 4), (needed[4] - 1, 3), (needed[3], 3)):
        monkeypatch.setattr("mpjax.memory.free_bytes", lambda device, free=free: free)
        assert module._choose_rows(tiny, 3, *sizes.values()) == rows
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: needed[3] - 1)
    with pytest.raises(DeviceMemoryError, match=r"a KV16 cache for 3 × 48 tokens, with prefill"):
        module._choose_rows(tiny, 3, *sizes.values())


def test_a_batch_is_read_in_one_round_trip(tiny, three, monkeypatch):
    """Once after prefill and once at the end; with a stop string after each chunk."""
    reads = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(tree) or get(tree))
    options = {"max_new_tokens": NEW, "sampling": HOT, "seeds": [1, 2, 3]}
    assert mpjax.generate(tiny, PROMPTS, **options).tokens == three.tokens
    assert len(reads) == 2
    mpjax.generate(tiny, PROMPTS, **options, stop="zzz")
    assert len(reads) == 2 + 1 + 2


@pytest.fixture
def counted(monkeypatch, trace_counter):
    """Fresh jits in the place of the module's, which count how often they are traced."""
    prefill, decode = trace_counter(decoding.prefill), trace_counter(decoding.decode)
    jitted = jax.jit(prefill, donate_argnames="cache")
    monkeypatch.setattr(module, "jit_prefill", jitted)
    jitted_decode = jax.jit(decode, donate_argnames="state")
    monkeypatch.setattr(module, "decode_program", lambda model, state: jitted_decode)
    return lambda: (prefill.count, decode.count)


def test_the_same_shapes_are_never_traced_twice(tiny, counted):
    def run(prompt, **options):
        return mpjax.generate(tiny, prompt, **options)

    run("import os", max_new_tokens=10, sampling=Sampling(temperature=1.0, top_p=0.9))
    assert counted() == (1, 1)
    # Another prompt and numbers of the same buckets, other values, seeds and stops.
    other = Sampling(temperature=2, top_p=0.5)
    longer = dataclasses.replace(other, min_new_tokens=3, stop_ids=[5, 6])
    run("def f(", max_new_tokens=16, sampling=longer, seeds=[4], stop="zzz")
    run("def f(", max_new_tokens=16, sampling=other, stop=["<|endoftext|>"])  # stops by its id
    list(mpjax.stream(tiny, "x", max_new_tokens=12, sampling=other, seed=9))
    assert counted() == (1, 1)
    run("x = 1\n" * 10, max_new_tokens=10, sampling=other)  # a longer bucket, the same state
    assert counted()[0] == 2


def test_a_cache_that_is_too_large_is_refused_before_it_is_allocated(tiny, monkeypatch):
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: 10_000)
    lm = dataclasses.replace(tiny, kv_format=KVFormat(8))
    allocated = []
    create = type(lm.model).create_cache

    def watched(*args):
        cache = create(*args)
        if isinstance(cache.lengths, jax.core.Tracer):
            return cache
        allocated.append(cache)
        return cache

    monkeypatch.setattr(type(lm.model), "create_cache", watched)
    with pytest.raises(
        DeviceMemoryError, match="a KV8 cache for 2 × 144 tokens, with prefill, needs"
    ):
        mpjax.generate(lm, ["x", "y"])
    assert not allocated


def test_time_between_pieces_is_not_decoding(tiny, monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
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
