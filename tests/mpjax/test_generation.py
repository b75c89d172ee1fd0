from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax import Sampling, decoding
from mpjax import generation as module
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import Llama
from mpjax.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import byte_level, metaspace, sentencepiece

pytestmark = pytest.mark.usefixtures("exact_products")


PROMPTS = ["def f(x):\n    return", "import", "class Stack(list):\n    "]
HOT = Sampling(temperature=1.2)
NEW = 24


def drain(stream):
    """The pieces of a stream, and what it returns."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.fixture(scope="module")
def hot(tiny):
    """A generation of the three prompts that nothing ends early."""
    return mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling=HOT, seeds=[1, 2, 3])


@pytest.fixture(scope="module")
def alone(tiny):
    """The third prompt's."""
    return mpjax.generate(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT, seeds=[3])


def test_it_is_the_same_where_jax_counts_in_64_bits(tiny):
    options = {"max_new_tokens": NEW, "stop": ["zzz"]}
    expected = mpjax.generate(tiny, PROMPTS, **options)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert mpjax.generate(tiny, PROMPTS, **options).tokens == expected.tokens


def test_it_is_generate_tokens_with_a_tokenizer(tiny, hot):
    ids = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    padded = np.zeros((3, 16), np.int32)
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    found = decoding.generate_tokens(
        tiny.model,
        jnp.asarray(padded),
        jnp.asarray([len(tokens) for tokens in ids], jnp.int32),
        [1, 2, 3],
        max_new_tokens=module.bucket(NEW),  # whose programs are compiled already
        sampling=HOT,
        kv_format=tiny.kv_format,
    )
    assert hot.tokens == found.tokens[:, :NEW].tolist()
    np.testing.assert_allclose(hot.logprobs, found.logprobs[:, :NEW], rtol=1e-5)
    assert hot.prompt_tokens == [len(tokens) for tokens in ids]
    assert hot.text == [tiny.tokenizer.decode(row) for row in hot.tokens]
    assert hot.finish_reasons == ["length"] * 3


def test_a_row_does_not_depend_on_its_neighbours(hot, alone):
    assert (alone.text, alone.tokens) == (hot.text[2:], hot.tokens[2:])
    np.testing.assert_allclose(alone.logprobs, hot.logprobs[2:], rtol=1e-4)


def test_speed_leaves_the_first_token_out(hot):
    assert hot.prefill_seconds > 0
    assert hot.tokens_per_second == pytest.approx(3 * (NEW - 1) / hot.decode_seconds)
    one = dataclasses.replace(hot, tokens=[[1]], decode_seconds=0.0)
    assert one.tokens_per_second == 0


def test_pieces_of_a_stream_joined_are_the_text(tiny, alone):
    stream = mpjax.stream(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT, seed=3)
    pieces, returned = drain(stream)
    assert len(pieces) > 2
    assert all(pieces)
    assert ["".join(pieces)] == returned.text == alone.text
    assert (returned.tokens, returned.finish_reasons) == (alone.tokens, alone.finish_reasons)
    np.testing.assert_allclose(returned.logprobs, alone.logprobs, rtol=1e-5)


def test_time_between_pieces_is_not_decoding(tiny, monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    stream = mpjax.stream(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT)
    for _ in stream:
        now += 1000
    _, returned = drain(mpjax.stream(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT))
    assert returned.decode_seconds == 0


@pytest.mark.parametrize(("first", "last"), [(3, 3), (0, 1), (4, 5), (16, 17), (15, 18), (22, 23)])
def test_a_stop_string_ends_the_text_wherever_chunks_and_tokens_end(tiny, alone, first, last):
    """Chunks are tokens 0, 1 to 8, 9 to 16 and 17 to 23."""
    [whole], [tokens] = alone.text, alone.tokens
    before = tiny.tokenizer.decode(tokens[:first])
    upto = tiny.tokenizer.decode(tokens[: last + 1])
    # From within the first token to within the last one, and no earlier in the text.
    stop = upto[len(before) :] if first == last else upto[len(before) + 1 :]
    assert stop.isprintable()
    at = whole.index(stop)
    options = {"max_new_tokens": NEW, "sampling": HOT, "stop": stop}
    found = mpjax.generate(tiny, PROMPTS[2], seeds=[3], **options)
    assert found.text == [whole[:at]]
    assert found.finish_reasons == ["stop"]
    [used] = found.tokens
    assert used == tokens[: len(used)]
    assert stop in tiny.tokenizer.decode(used)
    assert stop not in tiny.tokenizer.decode(used[:-1])
    assert len(found.logprobs[0]) == len(used)
    pieces, returned = drain(mpjax.stream(tiny, PROMPTS[2], seed=3, **options))
    assert ["".join(pieces)] == found.text
    assert returned.tokens == found.tokens


def test_the_first_of_several_stop_strings_ends_its_row_alone(tiny, hot):
    whole = hot.text[1]
    stops = ["never in there", whole[20:26], whole[10:16]]
    for row in (0, 2):
        assert not any(stop in hot.text[row] for stop in stops), "choose other stop strings"
    found = mpjax.generate(
        tiny, PROMPTS, max_new_tokens=NEW, sampling=HOT, seeds=[1, 2, 3], stop=stops
    )
    assert found.text[1] == whole[: min(whole.index(stop) for stop in stops[1:])]
    assert found.finish_reasons == ["length", "stop", "length"]
    assert [found.text[row] for row in (0, 2)] == [hot.text[row] for row in (0, 2)]


LETTERS = Tokenizer(byte_level([], 256))


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_row_ends_where_a_stop_string_first_came_to_its_end(text, stops):
    row = module._Row(LETTERS, [], stops)
    row.push(LETTERS.encode(text))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    read = text[: min(ends)] if ends else text
    starts = [read.index(stop) for stop in stops if stop in read]
    assert row.finish() == (read[: min(starts)] if starts else text)
    assert row.stopped == bool(ends)
    assert len(row.tokens) == len(read)


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_row_shows_all_but_what_may_become_a_stop_string(text, stops):
    row = module._Row(LETTERS, [], stops)
    shown = []
    for end, token in enumerate(LETTERS.encode(text), 1):
        row.push([token])
        shown.append(row.certain_text())
        if row.stopped:
            break
        starts = (at for at in range(end + 1) if any(s.startswith(text[at:end]) for s in stops))
        assert shown[-1] == text[: next(starts)]
    assert all(row.finish().startswith(piece) for piece in shown)


def test_no_text_is_searched_twice_for_stop_strings():
    class Text(str):
        """Records where searches in it begin, and what is added to it is one, too."""

        searched: list[tuple[int, int]] = []  # noqa: RUF012 (of all of them)

        def find(self, string, *begin):
            self.searched.append((len(self), *begin))
            return super().find(string, *begin)

        def __add__(self, other):
            return Text(super().__add__(other))

    row = module._Row(LETTERS, [], ["ba", "bbb"])
    row.text = Text()
    row.push(LETTERS.encode("a" * 50))
    assert len(Text.searched) == 100
    assert all(length - begin <= 3 for length, begin in Text.searched)


class Repeater(Llama):
    """Says a word again and again."""

    word = 0

    def _logits(self, hidden):
        said = jnp.arange(self.config.vocab_size) == self.word
        return jnp.broadcast_to(said.astype(jnp.float32), (*hidden.shape[:-1], said.size))


@pytest.mark.parametrize("backend", [sentencepiece(), metaspace()], ids=["Llama 2's", "metaspace"])
def test_a_text_goes_on_as_the_tokenizer_decodes_prompt_and_completion(tiny, backend):
    """Such tokenizers take the space off the first word of what they decode."""
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer = Tokenizer(backend, chat_templates={"default": template})
    small = {"hidden_size": 32, "num_heads": 1, "num_kv_heads": 1, "windows": (None,)}
    model = Repeater(dataclasses.replace(tiny.config, **small), nnx.Rngs(0))
    model.word = backend.token_to_id("▁a")
    lm = mpjax.LanguageModel(model, tokenizer, KVFormat(16), Path("repeater"))
    for prompt in ("ab é", "a", " ", "☃", "ab</s>b"):
        found = mpjax.generate(lm, prompt, max_new_tokens=3)
        whole = tokenizer.decode(tokenizer.encode(prompt) + found.tokens[0])
        assert found.text == [" a a a"]
        assert tokenizer.decode(tokenizer.encode(prompt)) + found.text[0] == whole
        assert drain(mpjax.stream(lm, prompt, max_new_tokens=3))[0] == [" a", " a a"]
    assert mpjax.generate(lm, "ab é", max_new_tokens=3, stop=" a").text == [""]
    assert mpjax.generate(lm, "ab é", max_new_tokens=3, stop="a a").text == [" "]
    chat = [{"role": "user", "content": "ab é"}]  # whose header is no text: an answer begins anew
    for begun in ("ab</s>", chat):
        assert mpjax.generate(lm, begun, max_new_tokens=3).text == ["a a a"]


def test_a_stream_holds_back_what_may_become_a_stop_string(tiny, alone):
    [whole] = alone.text
    stop = whole[-3:] + "?"  # never completed, so it is all shown in the end
    pieces, _ = drain(
        mpjax.stream(tiny, PROMPTS[2], max_new_tokens=NEW, sampling=HOT, stop=stop, seed=3)
    )
    assert "".join(pieces) == whole


def test_a_stop_token_ends_a_row_and_has_no_text(tiny, hot, monkeypatch):
    token = hot.tokens[1][4]
    monkeypatch.setattr(tiny.tokenizer, "stop_ids", (token,))
    found = mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling=HOT, seeds=[1, 2, 3])
    assert found.tokens[1] == hot.tokens[1][: hot.tokens[1].index(token) + 1]
    assert found.finish_reasons[1] == "stop"
    assert len(found.logprobs[1]) == len(found.tokens[1])


def test_minimum_and_maximum(tiny, hot, monkeypatch):
    token = hot.tokens[1][4]
    monkeypatch.setattr(tiny.tokenizer, "stop_ids", (token,))
    options: dict[str, Any] = {"sampling": HOT, "seeds": [1, 2, 3]}
    found = mpjax.generate(tiny, PROMPTS, max_new_tokens=17, min_new_tokens=10, **options)
    assert all(10 <= len(row) <= 17 for row in found.tokens)
    assert token not in found.tokens[1][:9]
    assert found.tokens[0] == hot.tokens[0][:17]
    assert (
        mpjax.generate(tiny, PROMPTS, max_new_tokens=17, **options).tokens[1]
        == (hot.tokens[1][: hot.tokens[1].index(token) + 1])
    )


def test_chats_go_through_the_template(tiny, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setitem(tiny.tokenizer.chat_templates, "default", template)
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": HOT, "seeds": [3]}
    chat = [{"role": "system", "content": "class Stack"}]
    chat.append({"role": "user", "content": PROMPTS[2].removeprefix("class Stack")})
    expected = mpjax.generate(tiny, PROMPTS[2], **options)
    for prompts in (chat, [chat]):  # one chat, and a batch of one
        assert mpjax.generate(tiny, prompts, **options).tokens == expected.tokens


@pytest.fixture
def counted(monkeypatch, trace_counter):
    """Fresh jits in the place of the module's, which count how often they are traced."""
    prefill, decode = trace_counter(decoding.prefill), trace_counter(decoding.decode)
    jitted = jax.jit(prefill, static_argnames="room", donate_argnames="cache")
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
    run("def f(", max_new_tokens=16, min_new_tokens=3, sampling=other, seeds=[4], stop="zzz")
    run("def f(", max_new_tokens=16, sampling=other, stop=["<|endoftext|>"])  # stops by its id
    drain(mpjax.stream(tiny, "x", max_new_tokens=12, sampling=other, seed=9))
    assert counted() == (1, 1)
    run("x = 1\n" * 10, max_new_tokens=10, sampling=other)  # a longer bucket, the same state
    assert counted()[0] == 2


def test_buckets():
    assert [module.bucket(n) for n in (1, 16, 17, 64, 65, 512, 513, 1024, 1025)] == [
        *(16, 16, 32, 64, 128, 512, 1024, 1024, 1536)
    ]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts"),
        ("", {}, "prompt 0 is empty"),
        (["x", ""], {}, "prompt 1 is empty"),
        (["x", "import os\n" * 100], {}, "prompt 1 has .* positions"),
        ("x", {"max_new_tokens": 256}, "prompt 0 has 1 tokens, and with 256 .* 256 positions"),
        ("x", {"max_new_tokens": 0}, "at least one new token"),
        ("x", {"min_new_tokens": 200}, "min_new_tokens is 200 and max_new_tokens 128"),
        ("x", {"min_new_tokens": -1}, "min_new_tokens is -1"),
        ("x", {"stop": ""}, "empty stop string"),
        ("x", {"stop": ["a", ""]}, "empty stop string"),
        ("x", {"max_new_tokens": 4.0}, r"max_new_tokens is 4\.0; it must be a whole number"),
        ("x", {"stop": [5]}, "stop string 5 is no text"),
        (["x", "y"], {"seeds": [1]}, "1 seeds for 2 prompts"),
        ("x", {"seeds": 5}, "seeds are 5; expected a list"),
        ([[{"role": "user", "content": "x"}]], {}, "no chat template"),
        (
            {"role": "user", "content": "x"},
            {},
            "prompts are a dict; .* a list",
        ),
        (iter(["x"]), {}, "prompts are a list_iterator"),
        ("caf\udce9", {}, "character 3 of the text is .* no UTF-8 has"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tiny, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        mpjax.generate(tiny, prompts, **options)


def test_numbers_of_numpy_and_no_stop_strings_are_fine(tiny, alone):
    found = mpjax.generate(
        tiny, PROMPTS[2], max_new_tokens=np.int64(NEW), sampling=HOT, seeds=[3], stop=None
    )
    assert (found.text, found.tokens) == (alone.text, alone.tokens)


def test_a_model_without_tokenizer_has_no_text(tiny):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        mpjax.generate(dataclasses.replace(tiny, tokenizer=None), "x")


def test_a_tokenizer_of_another_checkpoint_is_noticed(tiny):
    small = dataclasses.replace(tiny.config, vocab_size=10)
    model = dataclasses.replace(tiny)
    object.__setattr__(model, "model", type("Model", (), {"config": small})())
    with pytest.raises(ValueError, match="not from the same checkpoint"):
        mpjax.generate(model, "import os")


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


def test_a_stop_string_that_is_a_special_token_stops_by_its_id(tiny, alone):
    """Such a token has no text, so no search of the text could find it."""
    place, chosen = next(
        (place, token)
        for place, token in enumerate(alone.tokens[0])
        if place > 2 and token not in alone.tokens[0][:place]
    )
    backend = tokenizers.Tokenizer.from_str(tiny.tokenizer.backend.to_str())
    name = backend.id_to_token(chosen)
    backend.add_special_tokens([name])
    lm = dataclasses.replace(tiny, tokenizer=Tokenizer(backend, stop_ids=tiny.tokenizer.stop_ids))
    found = mpjax.generate(
        lm, PROMPTS[2], max_new_tokens=NEW, sampling=HOT, seeds=[3], stop=["zzz", name]
    )
    assert found.tokens == [alone.tokens[0][: place + 1]]
    assert found.finish_reasons == ["stop"]
    assert name not in found.text[0]
