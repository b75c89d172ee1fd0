from __future__ import annotations

import copy
import dataclasses

import jax
import numpy as np
import pytest

import mpjax
from mpjax.engine.request import Options, encode_batch, encode_one, row_text
from mpjax.sampling.random_keys import key_words
from mpjax.sampling.settings import UNLIMITED
from mpjax.sampling.token_lists import NO_ID

pytestmark = pytest.mark.any_version


def settings(lm, sampling=None, stop=(), most=9, seed=3):
    return Options(most, sampling, stop, [seed]).read(lm, 1).settings(0, 16)


def ids_of(found):
    ids = found.row.stop_ids[0]
    return ids[ids != NO_ID].tolist()


def test_settings_are_one_row_of_numbers(tiny):
    found = settings(tiny, {"temperature": 0.5, "top_p": 0.9, "min_new_tokens": 2}, ["a", "bc"])
    assert found.stop == ["a", "bc"]
    assert found.most == 9
    row = found.row
    assert (row.temperature[0], row.top_k[0], row.min_new_tokens[0]) == (0.5, UNLIMITED, 2)
    assert row.key_words.tolist() == key_words([3]).tolist()
    assert ids_of(found) == list(tiny.tokenizer.stop_ids)
    assert found.is_stop(tiny.tokenizer.stop_ids[0])
    assert not found.is_stop(NO_ID)
    key = jax.random.key(8, impl="threefry2x32")
    assert settings(tiny, seed=key).row.key_words.tolist() == [[0, 8]]


def test_the_models_own_minimum_ends_at_the_most_new_tokens(tiny):
    own = dataclasses.replace(tiny, sampling=mpjax.Sampling(min_new_tokens=20))
    for most, expected in ((9, 9), (30, 20)):
        assert settings(own, most=most).min_new_tokens == expected
    with pytest.raises(ValueError, match="min_new_tokens is 10 and max_new_tokens 9"):
        settings(own, {"min_new_tokens": 10})


def test_a_stop_string_that_is_a_token_stops_by_its_id(tiny):
    special = next(iter(tiny.tokenizer.special_ids))
    text = tiny.tokenizer.backend.id_to_token(special)
    found = settings(tiny, {"stop_ids": [11]}, [text])
    assert ids_of(found) == [11, special]


def test_arrays_of_a_sampling_have_a_number_for_each_row(tiny):
    """Also beside a constraint, which gives its own row alone the model's stop ids."""
    one = {"temperature": [0.5, 0.0], "top_k": 7, "presence_penalty": [0.0, 1.5], "stop_ids": ()}
    bound = [mpjax.Regex("a*"), None]
    found = Options(9, one, constraint=bound).read(tiny, 2)
    assert found.rows.temperature.tolist() == [0.5, 0.0]
    assert [it.presence_penalty for it in found.samplings] == [0.0, 1.5]
    assert [ids_of(found.settings(row, 16)) for row in (0, 1)] == [[*tiny.tokenizer.stop_ids], []]
    for name in ("temperature", "repetition_penalty"):
        for values in ([1.1], [1.1, 1.2, 1.3]):
            with pytest.raises(ValueError, match=f"{name} has shape .*: a batch of 2"):
                Options(9, {name: values}).read(tiny, 2)


def test_stop_ids_that_no_token_has_are_refused(tiny):
    assert ids_of(settings(tiny, {"stop_ids": [2047]})) == [2047]
    with pytest.raises(ValueError, match=r"stop_ids are \[3, 2048\]: expected each from 0 to 2047"):
        settings(tiny, {"stop_ids": [3, 2048]})
    for prompts in (["a"], [[1]]):
        with pytest.raises(ValueError, match="from 0 to 2047, the model's vocabulary"):
            mpjax.generate(tiny, prompts, sampling={"stop_ids": [2048]})
    with pytest.raises(ValueError, match="from 0 to 2047, the model's vocabulary"):
        mpjax.generate_tokens(
            tiny.model, [[1]], [1], max_new_tokens=1, sampling={"stop_ids": [2048]}
        )


def test_when_the_likeliest_token_is_taken(tiny):
    assert settings(tiny).greedy_from == 0
    assert settings(tiny, {"temperature": 1}).greedy_from is None
    penalised = Options(9, {"repetition_penalty": [1.0, 1.1]}, (), [3, 4]).read(tiny, 2)
    found = [penalised.controlled(row, penalised.settings(row, 16), tiny, ()) for row in (0, 1)]
    assert [one.greedy_from for one in found] == [0, None]
    assert settings(tiny, {"min_new_tokens": 3}).greedy_from == 3
    asked = Options().read(tiny, 1).settings(0, 16, top_logprobs=1)
    assert (asked.greedy_from, asked.top_logprobs) == (None, 1)


def test_prompts_are_single_ones(tiny):
    assert encode_one(tiny, np.array([1, 2]), None) == [1, 2]
    assert encode_one(tiny, "import", None) == tiny.tokenizer.encode("import")
    with pytest.raises(ValueError, match="prompt is not a single prompt"):
        encode_one(tiny, ["a", "b"], None)
    silent = dataclasses.replace(tiny, tokenizer=None)
    assert encode_one(silent, [3], None) == [3]
    assert row_text(silent, [3], settings(silent)) is None
    for call in (lambda: encode_one(silent, "a", None), lambda: settings(silent, stop="a")):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


@pytest.mark.parametrize("prompts", [None, 5, [None], [1.5], [[1], 2], np.array(3), [[1.5]], [[]]])
def test_what_is_no_prompt_is_refused_with_and_without_a_tokenizer(tiny, prompts):
    for lm in (tiny, dataclasses.replace(tiny, tokenizer=None)):
        with pytest.raises(ValueError, match=r"^prompts? (0 |1 )?(is|are) "):
            encode_batch(lm, prompts)


def test_stop_ids_of_the_tokenizer_that_the_model_lacks_end_nothing(tiny):
    """A tokenizer may have more tokens than the model has rows of its embedding."""
    own = list(tiny.tokenizer.stop_ids)
    tokenizer = copy.copy(tiny.tokenizer)
    tokenizer.stop_ids = (*own, 2048)
    assert ids_of(settings(dataclasses.replace(tiny, tokenizer=tokenizer))) == own
