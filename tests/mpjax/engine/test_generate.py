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

import mpjax
from mpjax import Sampling
from mpjax.errors import NotFiniteError
from mpjax.generation import decoding
from mpjax.generation.buckets import bucket_tokens
from mpjax.kernels import KVFormat, KVLayout
from mpjax.kernels.kv_cache.layout import PAGE_SIZES
from mpjax.models import Llama
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.conftest import TINY
from tests.mpjax.odd_models import write_overflowing_model
from tests.mpjax.tokenizer_folders import metaspace, sentencepiece

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
        max_new_tokens=bucket_tokens(NEW),
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


class Repeater(Llama):
    """Says a word again and again."""

    word = 0

    def _logits(self, hidden, context):
        said = jnp.arange(self.config.vocab_size) == self.word
        return jnp.broadcast_to(said.astype(jnp.float32), (*hidden.shape[:-1], said.size))


@pytest.mark.parametrize("backend", [sentencepiece(), metaspace()], ids=["Llama 2's", "metaspace"])
def test_a_text_goes_on_as_the_tokenizer_decodes_prompt_and_completion(tiny, backend):
    """Such tokenizers take the space off the first word of what they decode."""
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer = Tokenizer(backend, chat_templates={"default": template})
    small: dict[str, Any] = {"hidden_size": 32, "num_heads": 1, "num_kv_heads": 1}
    small |= {"layers": tiny.config.layers[:1]}
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


def test_stop_strings_wait_for_the_minimum_as_stop_tokens_do(tiny, alone):
    [whole], [tokens] = alone.text, alone.tokens
    stop = tiny.tokenizer.decode(tokens[1:3])
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": HOT, "stop": stop}
    assert mpjax.generate(tiny, PROMPTS[2], seeds=[3], **options).text == [
        whole[: whole.index(stop)]
    ]
    for minimum in (3, 4, NEW):
        options["sampling"] = dataclasses.replace(HOT, min_new_tokens=minimum)
        found = mpjax.generate(tiny, PROMPTS[2], seeds=[3], **options)
        ends = minimum == 3  # whose third token is the end of the stop string
        assert found.tokens == [tokens[:3] if ends else tokens]
        assert found.text == [whole[: whole.index(stop)] if ends else whole]
        pieces, returned = drain(mpjax.stream(tiny, PROMPTS[2], seed=3, **options))
        assert ["".join(pieces)] == found.text
        assert returned.finish_reasons == found.finish_reasons == ["stop" if ends else "length"]


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
    longer = options | {"sampling": dataclasses.replace(HOT, min_new_tokens=10)}
    found = mpjax.generate(tiny, PROMPTS, max_new_tokens=17, **longer)
    assert all(10 <= len(row) <= 17 for row in found.tokens)
    assert token not in found.tokens[1][:9]
    assert found.tokens[0] == hot.tokens[0][:17]
    assert (
        mpjax.generate(tiny, PROMPTS, max_new_tokens=17, **options).tokens[1]
        == (hot.tokens[1][: hot.tokens[1].index(token) + 1])
    )


def test_the_models_own_sampling_is_the_default_of_all_but_generate_tokens(tiny, hot):
    lm = dataclasses.replace(tiny, sampling=HOT)
    options: dict[str, Any] = {"max_new_tokens": NEW, "seeds": range(3)}
    expected = mpjax.generate(tiny, PROMPTS, sampling=HOT, **options)
    assert mpjax.generate(lm, PROMPTS, **options).tokens == expected.tokens
    pieces, _ = drain(mpjax.stream(lm, PROMPTS[0], max_new_tokens=NEW, seed=0))
    assert ["".join(pieces)] == expected.text[:1]
    greedy = mpjax.generate(tiny, PROMPTS, **options).tokens
    assert greedy != expected.tokens
    for sampling in (Sampling(), {"temperature": 0}):
        assert mpjax.generate(lm, PROMPTS, sampling=sampling, **options).tokens == greedy
    with mpjax.Engine(lm, slots=3, max_tokens=256) as engine:
        drawn = engine.generate(PROMPTS, **options).tokens
        assert drawn == engine.generate(PROMPTS, sampling=HOT, **options).tokens != greedy
        handle = engine.submit(PROMPTS[1], max_new_tokens=NEW, seed=1)
        assert handle.result().tokens == drawn[1]
    found = mpjax.generate_tokens(
        lm.model,
        jnp.array([tiny.tokenizer.encode(PROMPTS[0])]),
        lengths=jnp.array([len(tiny.tokenizer.encode(PROMPTS[0]))]),
        max_new_tokens=NEW,
    )
    assert found.tokens[0, : found.lengths[0]].tolist() == greedy[0]


def test_chats_go_through_the_template(tiny, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setitem(tiny.tokenizer.chat_templates, "default", template)
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": HOT, "seeds": [3]}
    chat = [{"role": "system", "content": "class Stack"}]
    chat.append({"role": "user", "content": PROMPTS[2].removeprefix("class Stack")})
    expected = mpjax.generate(tiny, PROMPTS[2], **options)
    for prompts in (chat, [chat]):  # one chat, and a batch of one
        assert mpjax.generate(tiny, prompts, **options).tokens == expected.tokens
    monkeypatch.delitem(tiny.tokenizer.chat_templates, "default")
    found = mpjax.generate(tiny, chat, chat_template=template, **options)
    assert found.tokens == expected.tokens
    pieces, _ = drain(
        mpjax.stream(tiny, chat, chat_template=template, max_new_tokens=NEW, sampling=HOT, seed=3)
    )
    assert ["".join(pieces)] == expected.text


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts are empty"),
        ("", {}, "prompt 0 is empty"),
        (["x", ""], {}, "prompt 1 is empty"),
        (["x", "import os\n" * 100], {}, "prompt 1 has .* positions"),
        ("x", {"max_new_tokens": 257}, "prompt 0 has 1 tokens, and with 257 .* 256 positions"),
        ("x", {"max_new_tokens": 0}, "at least one new token"),
        (
            "x",
            {"sampling": {"min_new_tokens": 200}},
            "min_new_tokens is 200 and max_new_tokens 128",
        ),
        ("x", {"sampling": {"min_new_tokens": -1}}, "min_new_tokens is -1: expected a number"),
        ("x", {"stop": ""}, "has an empty string"),
        ("x", {"stop": ["a", ""]}, "has an empty string"),
        ("x", {"max_new_tokens": 4.0}, r"max_new_tokens is 4\.0: expected a whole number"),
        ("x", {"stop": [5]}, "stop has 5: expected a string"),
        (["x", "y"], {"seeds": [1]}, "there are 1 seeds for a batch of 2"),
        ("x", {"seeds": 5}, "seeds are 5: expected integers"),
        ([[{"role": "user", "content": "x"}]], {}, "no chat template, .*: pass chat_template="),
        ("x", {"chat_template": "default"}, "chat_template is given"),
        ([[1, 2], [3, 2048]], {}, "prompt 1 has the token id 2048: expected 0 to 2047"),
        (["x", "y"], {"sampling": Sampling([1.0] * 4)}, r"temperature has shape \(4,\): a batch"),
        (
            {"role": "user", "content": "x"},
            {},
            "prompts are a dict: .* a list",
        ),
        (iter(["x"]), {}, "prompts are a list_iterator"),
        ("caf\udce9", {}, "character 3 of the text is .* which UTF-8 can't"),
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


def test_token_ids_are_read_as_they_are(tiny, hot, alone):
    ids = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": HOT}
    found = mpjax.generate(
        tiny, [ids[0], PROMPTS[1], np.asarray(ids[2])], seeds=[1, 2, 3], **options
    )
    assert (found.tokens, found.text) == (hot.tokens, hot.text)
    for prompt in (ids[2], [ids[2]], jnp.asarray(ids[2]), np.asarray([ids[2]])):
        assert mpjax.generate(tiny, prompt, seeds=[3], **options).tokens == alone.tokens
    pieces, _ = drain(mpjax.stream(tiny, ids[2], seed=3, **options))
    assert ["".join(pieces)] == alone.text


def test_seeds_may_be_keys(tiny, hot, alone):
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(jnp.asarray([1, 2, 3]))
    options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": HOT}
    for seeds in (keys, jax.random.key_data(keys)):
        assert mpjax.generate(tiny, PROMPTS, seeds=seeds, **options).tokens == hot.tokens
        _, found = drain(mpjax.stream(tiny, PROMPTS[2], seed=seeds[2], **options))
        assert found.tokens == alone.tokens


def test_a_batch_streams_the_text_of_all_rows(tiny, hot, monkeypatch):
    """Rows that end with a stop token, with a stop string and by their length."""
    token = hot.tokens[1][4]
    monkeypatch.setattr(tiny.tokenizer, "stop_ids", (token,))
    stop = hot.text[0][10:16]
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "sampling": HOT,
        "seeds": [1, 2, 3],
        "stop": stop,
    }
    expected = mpjax.generate(tiny, PROMPTS, **options)
    assert expected.finish_reasons == ["stop", "stop", "length"]
    pieces, found = drain(mpjax.stream_batch(tiny, PROMPTS, **options))
    assert (found.text, found.tokens) == (expected.text, expected.tokens)
    for row, text in enumerate(expected.text):
        mine = [piece for piece in pieces if piece.row == row]
        assert "".join(piece.text for piece in mine) == text
        assert [piece.finish_reason for piece in mine] == [
            *[None] * (len(mine) - 1),
            expected.finish_reasons[row],
        ]
        assert all(piece.text for piece in mine[:-1])
    ends = [place for place, piece in enumerate(pieces) if piece.finish_reason]
    assert ends[0] < len(pieces) - 3, "a row that ends early says so early"


def test_one_stream_is_of_one_prompt(tiny):
    for prompts in (PROMPTS, [], [[1, 2]], None):
        with pytest.raises(
            ValueError, match=r"prompt is not a single prompt: expected .*; stream_batch takes"
        ):
            next(mpjax.stream(tiny, prompts))
    assert [piece.row for piece in mpjax.stream_batch(tiny, "x", max_new_tokens=1)] == [0]


def test_float16_that_overflows_is_told_of_bfloat16(tiny_folder, tmp_path):
    folder = write_overflowing_model(tmp_path / "loud", tiny_folder, TINY)
    options: dict[str, Any] = {"max_new_tokens": NEW, "stop": "zzz"}
    lm = mpjax.load(folder)
    message = r'^prompt 0: .* in float16, .* 65504: load it with dtype="bfloat16"'
    with pytest.raises(NotFiniteError, match=message):
        mpjax.generate(lm, PROMPTS[0], **options)
    for stream in (mpjax.stream, mpjax.stream_batch):
        with pytest.raises(NotFiniteError, match=message):
            next(stream(lm, PROMPTS[0], **options))
    found, expected = (
        mpjax.generate(mpjax.load(folder, dtype=dtype), PROMPTS[0], **options)
        for dtype in ("bfloat16", "float32")
    )
    assert found.tokens[0][:4] == expected.tokens[0][:4]
    np.testing.assert_allclose(found.logprobs[0][:4], expected.logprobs[0][:4], rtol=0.02)


@pytest.mark.parametrize(
    "function",
    [
        mpjax.load,
        mpjax.LanguageModel,
        KVLayout,
        Llama.create_cache,
    ],
    ids=lambda function: function.__name__,
)
def test_page_size_is_explained(function):
    text = " ".join(function.__doc__.split())
    assert "page_size: tokens in" in text or "page_size is the tokens in" in text
    assert f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]}" in text


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
