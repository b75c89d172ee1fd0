from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import mpjax
from mpjax.engine.request import Settings, encode_one, row_text
from mpjax.engine.state import ALL, NO_ID
from mpjax.random_keys import key_words

pytestmark = pytest.mark.any_version


def settings(lm, sampling=None, stop=(), most=9, seed=3):
    return Settings.of(lm, most, sampling, stop, seed)


def test_settings_are_one_row_of_numbers(tiny):
    found = settings(tiny, {"temperature": 0.5, "top_p": 0.9, "min_new_tokens": 2}, ["a", "bc"])
    assert found.stop == ["a", "bc"]
    assert found.most == 9
    row = found.row
    assert (row.temperature[0], row.top_k[0], row.least[0]) == (0.5, ALL, 2)
    assert row.key_words.tolist() == key_words([3]).tolist()
    ids = row.stop_ids[0]
    assert ids[ids != NO_ID].tolist() == list(found.stop_ids) == list(tiny.tokenizer.stop_ids)
    key = jax.random.key(8, impl="threefry2x32")
    assert settings(tiny, seed=key).row.key_words.tolist() == [[0, 8]]


def test_a_stop_string_that_is_a_token_stops_by_its_id(tiny):
    special = next(iter(tiny.tokenizer.special_ids))
    text = tiny.tokenizer.backend.id_to_token(special)
    found = settings(tiny, {"stop_ids": [11]}, [text])
    assert found.stop_ids == (11, special)


def test_stop_ids_that_no_token_has_are_refused(tiny):
    assert settings(tiny, {"stop_ids": [2047]}).stop_ids == (2047,)
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
    assert settings(tiny, {"repetition_penalty": 1.1}).greedy_from is None
    assert settings(tiny, {"repetition_penalty": 1.1}).has_penalty
    assert settings(tiny, {"min_new_tokens": 3}).greedy_from == 3
    told = settings(tiny)
    told.row.candidates[0] = 1
    assert (told.greedy_from, told.candidates) == (None, 1)


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
