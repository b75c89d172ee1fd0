"""What generation_config.json says about drawing tokens, and what is made of it."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from mpjax import Sampling
from mpjax.errors import CheckpointError
from mpjax.sampling.generation_config import (
    IRRELEVANT,
    NEUTRAL,
    OBEYED,
    read_sampling,
    to_keys,
)
from mpjax.sampling.rules import (
    KEYS,
    Cutoff,
    LengthDecay,
    MinLength,
    NoRepeat,
    Suppress,
    Typical,
)

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"eos_token_id": 1, "temperature": None}, None),
        ({"do_sample": True}, Sampling(1.0)),  # gpt-oss
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},  # Qwen3
            Sampling(0.6, 20, 0.95),
        ),
        (
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7},  # Qwen2.5
            Sampling(0.7, repetition_penalty=1.05),
        ),
        (
            {"do_sample": True, "temperature": 0.01, "top_p": 0.001, "top_k": 1},  # Qwen2-VL
            Sampling(0.01, 1, 0.001),
        ),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.6, top_p=0.9)),  # without do_sample
        ({"min_p": 0.1}, Sampling(1.0, min_p=0.1)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, Sampling()),
        ({"do_sample": False, "repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"do_sample": False, "min_new_tokens": 3}, Sampling(min_new_tokens=3)),
        ({"temperature": 0.0, "top_p": 0.5}, Sampling()),
        ({"temperature": 1, "top_k": 0, "top_p": 1.0}, Sampling(1.0, top_p=1.0)),
        ({"temperature": 1, "top_k": -1}, Sampling(1.0)),
        ({"temperature": 2, "top_p": 0.0}, Sampling(2.0, 1)),
        ({"sequence_bias": {}, "bad_words_ids": [], "suppress_tokens": []}, None),
        ({"typical_p": 0.9, "do_sample": False}, Sampling()),
        ({"typical_p": 0.9}, Sampling(1.0, rules=(Typical(0.9),))),
        (
            {"do_sample": True, "typical_p": 1.0, "epsilon_cutoff": 2e-3, "eta_cutoff": 1e-3},
            Sampling(1.0, rules=(Cutoff(2e-3), Cutoff(1e-3, True))),
        ),
        ({"bad_words_ids": [[7]] * 65}, Sampling(rules=(Suppress((7,) * 65),))),
    ],
)
def test_the_authors_sampling_is_read(written, expected):
    found = read_sampling(written, "file")
    assert found == expected
    if found is not None:
        assert read_sampling(json.loads(json.dumps(to_keys(found))), "file") == found


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"temperature": "hot"}, "file: temperature is 'hot': expected a number"),
        ({"temperature": -1}, r"file: temperature is -1.0: expected a number .* 0 or above"),
        ({"top_p": 1.5}, "file: top_p is 1.5: expected a number above 0 and at most 1"),
        ({"bad_words_ids": "a"}, "file: bad_words_ids is 'a': expected a list"),
        ({"bad_words_ids": [["a"]]}, r"file: bad_words are .*: expected a list of lists of token"),
        ({"sequence_bias": [[[], 3.0]]}, "expected pairs of a list with one token id"),
        ({"sequence_bias": {"1": 3.0}}, "file: sequence_bias is {'1': 3.0}: expected a list"),
        (
            {"no_repeat_ngram_size": 1.5},
            "file: no_repeat_ngram_size is 1.5: expected a whole number",
        ),
        ({"typical_p": 0}, "file: typical_p is 0: expected a number above 0 and below 1"),
        (
            {"begin_suppress_tokens": ["a"]},
            "begin_suppress_tokens is .*: expected a list of token ids",
        ),
    ],
)
def test_values_out_of_range_are_refused(written, message):
    with pytest.raises(CheckpointError, match=message):
        read_sampling(written, "file")


def test_lists_are_read_and_written():
    written = {"bad_words_ids": [[3, 4]], "suppress_tokens": [5]}
    found = read_sampling(written | {"sequence_bias": [[[7], 2.0]]}, "file")
    assert found is not None
    keys = json.loads(json.dumps(to_keys(found)))
    expected = {"bad_words_ids": [[3, 4], [5]], "sequence_bias": [[[7], 2.0]]}
    assert keys == {"do_sample": False, **expected}
    assert to_keys(read_sampling(keys, "file")) == keys


def test_rules_are_read_and_written():
    written = {
        "suppress_tokens": [*range(70)],  # more than the bad words of a Sampling
        "begin_suppress_tokens": [220, 7],
        "min_length": 12,
        "no_repeat_ngram_size": 3,
        "exponential_decay_length_penalty": [5, 1.5],
    }
    found = read_sampling(written | {"eos_token_id": [2, 3]}, "file")
    assert found is not None
    assert found.rules == (
        Suppress(tuple(range(70))),
        Suppress((220, 7), only_first=True),
        MinLength(12, (2, 3)),
        NoRepeat(3),
        LengthDecay(5, 1.5, (2, 3)),
    )
    keys = json.loads(json.dumps(to_keys(found)))
    assert keys == {"do_sample": False, "eos_token_id": [2, 3], **written}
    assert read_sampling(keys, "file") == found
    neutral = dict.fromkeys(written, 0) | {"begin_suppress_tokens": [], "suppress_tokens": []}
    assert read_sampling(neutral | {"exponential_decay_length_penalty": None}, "file") is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"min_length": 3}, "an eos_token_id beside it"),
        ({"bad_words_ids": [[7, 8]] * 65}, "at most 64 words of up to 8 tokens"),
        ({"bad_words_ids": [[7] * 9]}, "at most 64 words of up to 8 tokens"),
        ({"sequence_bias": [[[1, 2], 3.0]]}, "at most 300 biases, of one token each"),
    ],
)
def test_what_can_not_be_obeyed_is_refused(written, expected):
    [[key, value]] = written.items()
    told = re.escape(f"file: {key} is {value!r:.80}: expected {expected}.")
    with pytest.raises(CheckpointError, match=told):
        read_sampling(written | {"do_sample": True}, "file")


def test_unknown_keys_are_named():
    told = "file has chat_format 'chatml': mpjax does not know it"
    with pytest.warns(UserWarning, match=f"^{re.escape(told)}$"):
        assert read_sampling({"chat_format": "chatml", "do_sample": True}, "file") == Sampling(1.0)


def test_every_key_of_transformers_is_known_and_its_defaults_are_neutral():
    config = pytest.importorskip("transformers").GenerationConfig()
    unknown = {*config.to_dict()} - OBEYED - IRRELEVANT - {*NEUTRAL}
    assert not unknown  # decide for each whether it changes what a decoder draws
    assert not OBEYED & IRRELEVANT | IRRELEVANT & {*NEUTRAL} | OBEYED & {*NEUTRAL}
    defaults = config._get_default_generation_params()
    with warnings.catch_warnings(action="error"):
        assert read_sampling(defaults, "file") == Sampling(
            repetition_penalty=1.0, min_new_tokens=defaults.get("min_new_tokens")
        )
    for key in NEUTRAL:
        with pytest.raises(CheckpointError, match=f"file: {key} is 'x': expected .* not supported"):
            read_sampling({key: "x"}, "file")
    for key, value in (("forced_bos_token_id", 0), ("guidance_scale", 0.0)):  # of effect, and false
        with pytest.raises(CheckpointError, match=f"{key} is {value}: expected .* not supported"):
            read_sampling({key: value}, "file")


def test_logits_are_processed_as_by_transformers():
    """With every key that is obeyed, and with transformers' top_k where the file has one."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    jnp = pytest.importorskip("jax.numpy")
    import numpy as np

    from mpjax.sampling.controls import controls
    from mpjax.sampling.draw import process_logits
    from mpjax.sampling.processors import attach, process, read
    from mpjax.sampling.settings import RowSettings

    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32) * 2
    written = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05}
    end = int(logits.argmax())  # as a bad word, it is dropped
    lists = {"bad_words_ids": [[7, 20, 5], [11], [8, 4], [end]], "suppress_tokens": [2, 30]}
    written |= {"repetition_penalty": 1.3, **lists, "sequence_bias": [[[9], 2.5], [[1], -3.0]]}
    others = {*KEYS} - {"suppress_tokens"}  # rules; see test_controls.py
    assert {*written, "min_new_tokens"} == OBEYED - others
    ids = torch.tensor([[3, 7, 7, 20]])
    sampling = read_sampling(written | {"eos_token_id": end}, "file")
    attached = tuple(attach(it, 1, 50, shared=False) for it in controls([sampling], 1, 50, 50))
    attached = read(attached, jnp.asarray(ids.numpy(), jnp.int32), jnp.array([4]))
    found = process_logits(
        process(attached, jnp.asarray(logits), jnp.zeros(1, jnp.int32)),
        RowSettings.of([sampling], 1),
    )
    steps = transformers.generation.logits_process
    expected = torch.from_numpy(logits)
    for each in (
        steps.NoBadWordsLogitsProcessor(lists["bad_words_ids"], eos_token_id=end),
        steps.SuppressTokensLogitsProcessor(lists["suppress_tokens"]),
        steps.SequenceBiasLogitsProcessor(written["sequence_bias"]),
        steps.RepetitionPenaltyLogitsProcessor(written["repetition_penalty"]),
        steps.TemperatureLogitsWarper(written["temperature"]),
        steps.TopKLogitsWarper(written["top_k"]),
        steps.TopPLogitsWarper(written["top_p"]),
        steps.MinPLogitsWarper(written["min_p"]),
    ):
        expected = each(ids, expected)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert 1 < np.isfinite(expected.numpy()).sum() < 9
    assert np.isfinite(found[0, end])
