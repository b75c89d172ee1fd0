"""Penalties, biases, and allowed and bad tokens, against transformers and OpenAI's definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.sampling.controls import changes_logits, controls
from mpjax.sampling.draw import process_logits
from mpjax.sampling.processors import advance, attach, process, process_along, read
from mpjax.sampling.rules import (
    Cutoff,
    LengthDecay,
    MinLength,
    NoRepeat,
    Suppress,
    Typical,
    read_rows_rules,
)
from mpjax.sampling.settings import UNLIMITED, RowSettings, Sampling

VOCABULARY = 40
PROMPTS = np.array([[3, 5, 3, 9], [1, 2, 0, 0]])
LENGTHS = np.array([4, 2])
TEXT = np.array([[5, 7, 5, 7], [2, 2, 2, 1]])


def attached(samplings, prompts=PROMPTS, lengths=LENGTHS):
    """The processors of two rows behind their prompts."""
    own = controls(samplings, 2, VOCABULARY, VOCABULARY)
    begun = tuple(attach(one, 2, VOCABULARY, shared=False) for one in own)
    rules = read_rows_rules(samplings, 8)
    begun += tuple(attach(one, 2, VOCABULARY, shared=True) for one in rules)
    return read(begun, jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32))


def told(processors, text):
    return advance(processors, jnp.asarray(text, jnp.int32), jnp.ones(np.shape(text), bool))


@pytest.fixture
def logits(rng):
    return rng.normal(scale=3, size=(2, VOCABULARY)).astype(np.float32)


ALL = {
    "repetition_penalty": 1.3,
    "logit_bias": {3: 2.5, 5: -100.0, 7: 1.0},
    "bad_words": [[11], [5, 7, 9], [9, 5], [7, 13]],
}


@pytest.mark.parametrize("fields", [{name: ALL[name]} for name in ALL] + [ALL])
def test_logits_equal_those_of_transformers(fields, logits):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    chain = hf.LogitsProcessorList()  # in the order of GenerationMixin._get_logits_processor
    if biases := fields.get("logit_bias"):
        chain.append(hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in biases.items()]))
    if penalty := fields.get("repetition_penalty"):
        chain.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
    if words := fields.get("bad_words"):
        chain.append(hf.NoBadWordsLogitsProcessor(words))
    processors = attached([Sampling(**fields)])
    for number in range(TEXT.shape[1]):
        found = process(processors, jnp.asarray(logits), jnp.full(2, number))
        for row in range(2):
            text = [*PROMPTS[row, : LENGTHS[row]], *TEXT[row, :number]]
            expected = chain(torch.tensor([text]), torch.from_numpy(logits[row : row + 1].copy()))
            np.testing.assert_allclose(found[row], expected.numpy()[0], rtol=1e-6)
        processors = told(processors, TEXT[:, number : number + 1])


RULES = {  # a rule, and transformers' processor behind a prompt of some tokens
    "NoRepeatNGram": (NoRepeat(2), lambda hf, prompt: hf.NoRepeatNGramLogitsProcessor(2)),
    "repeat 3": (NoRepeat(3), lambda hf, prompt: hf.NoRepeatNGramLogitsProcessor(3)),
    "repeat 1": (NoRepeat(1), lambda hf, prompt: hf.NoRepeatNGramLogitsProcessor(1)),
    "suppress": (Suppress((3, 7)), lambda hf, prompt: hf.SuppressTokensLogitsProcessor([3, 7])),
    "begin": (
        Suppress((3, 7), only_first=True),
        lambda hf, prompt: hf.SuppressTokensAtBeginLogitsProcessor([3, 7], prompt),
    ),
    "length": (MinLength(5, (1, 2)), lambda hf, prompt: hf.MinLengthLogitsProcessor(5, [1, 2])),
    "decay": (
        LengthDecay(1, 1.5, (1, 2)),
        lambda hf, prompt: hf.ExponentialDecayLengthPenalty((1, 1.5), [1, 2], prompt),
    ),
}


@pytest.mark.parametrize("kind", RULES)
def test_rules_are_those_of_transformers(kind, logits):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rule, theirs = RULES[kind]
    processors, differs = attached([Sampling(rules=[rule])]), False
    for number in range(TEXT.shape[1]):
        found = process(processors, jnp.asarray(logits), jnp.full(2, number))
        for row in range(2):
            text = [*PROMPTS[row, : LENGTHS[row]], *TEXT[row, :number]]
            scores = torch.from_numpy(logits[row : row + 1].copy())
            expected = theirs(hf, int(LENGTHS[row]))(torch.tensor([text]), scores).numpy()[0]
            np.testing.assert_allclose(found[row], expected, rtol=1e-6)
            differs |= not np.array_equal(expected, logits[row])
        processors = told(processors, TEXT[:, number : number + 1])
    assert differs


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (Typical(0.6), "TypicalLogitsWarper"),
        (Cutoff(0.03), "EpsilonLogitsWarper"),
        (Cutoff(0.01, by_entropy=True), "EtaLogitsWarper"),
        (Cutoff(0.9), "EpsilonLogitsWarper"),  # none is as likely: the likeliest stays
    ],
)
def test_rules_that_filter_are_those_of_transformers(rule, theirs, logits):
    """After the temperature and the other filters; a greedy row is not filtered."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    sampling = Sampling(temperature=[0.5, 0], top_k=[20, UNLIMITED], rules=[rule])
    logits = logits * 2
    found = process_logits(jnp.asarray(logits), RowSettings.of([sampling], 2), attached([sampling]))
    [value] = rule.keys().values()
    steps = hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(20), getattr(hf, theirs)(value)
    expected = torch.from_numpy(logits[:1].copy())
    for step in steps:
        expected = step(None, expected)
    np.testing.assert_allclose(found[0], expected[0].numpy(), rtol=1e-6)
    assert 0 < np.isfinite(found[0]).sum() < 20
    np.testing.assert_array_equal(found[1], logits[1])


def test_presence_and_frequency_are_openais_and_count_the_output_alone(logits):
    """mu[j] - c[j] * frequency - float(c[j] > 0) * presence."""
    sampling = Sampling(presence_penalty=[0.5, 0], frequency_penalty=[0.25, -2.0])
    found = process(told(attached([sampling]), TEXT), jnp.asarray(logits), jnp.full(2, 4))
    expected = logits.copy()
    expected[0, [5, 7]] -= 2 * 0.25 + 0.5
    expected[1, 2] += 3 * 2.0
    expected[1, 1] += 2.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_allowed_tokens_are_the_only_ones(logits):
    found = process(attached([Sampling(allowed_ids=[3, 8])]), jnp.asarray(logits), jnp.zeros(2))
    assert np.argwhere(np.isfinite(found[0])).ravel().tolist() == [3, 8]


NUMBERS = st.sampled_from([0.0, 0.5, -1.5])
SAMPLINGS = st.builds(
    Sampling,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100, width=32), max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), max_size=3),
)
TEXTS = st.lists(st.integers(0, 6), min_size=6, max_size=6)


@settings(max_examples=20)
@given(st.tuples(SAMPLINGS, SAMPLINGS), st.tuples(TEXTS, TEXTS))
def test_proposed_tokens_count_as_drawn_ones(samplings, texts):
    """At each position the logits are those of steps of one token, also of a row beside others."""
    logits = np.random.default_rng(1).normal(size=(2, 7, VOCABULARY)).astype(np.float32)
    begun, drafts = attached(samplings), np.asarray(texts)
    numbers = jnp.zeros(2, jnp.int32)
    along = process_along(begun, jnp.asarray(logits), jnp.asarray(drafts, jnp.int32), numbers)
    for place in range(7):
        here = process(told(begun, drafts[:, :place]), jnp.asarray(logits[:, place]), numbers)
        np.testing.assert_array_equal(along[:, place], here)
    assert not any(changes_logits(one) for one in (Sampling(), Sampling(presence_penalty=0.0)))


def test_a_row_that_gets_no_token_remembers_none():
    begun = attached([Sampling(**ALL)])
    is_new = jnp.array([[True], [False]])
    after = advance(begun, jnp.full((2, 1), 7, jnp.int32), is_new)
    old, new = (jax.tree.map(np.asarray, [one.memory for one in it]) for it in (begun, after))
    assert any((x[0] != y[0]).any() for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[1]), old, new)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_ids": []}, "allowed_ids are empty, which allows no token"),
        ({"logit_bias": [3]}, "expected a mapping of token ids to numbers"),
        ({"logit_bias": {3: float("nan")}}, "expected finite numbers by token id"),
        ({"logit_bias": {-3: 1}}, r"logit_bias's token ids are \[-3\]"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "301 token ids: expected at most 300"),
        ({"logit_bias": {3: 1e39}}, "expected finite numbers by token id"),
        ({"logit_bias": {3: 10**400}}, "expected finite numbers by token id"),
        ({"logit_bias": ([1], ["2"])}, "expected finite numbers by token id"),
        ({"logit_bias": (None, np.array(2.0))}, r"\(\) token ids"),
        ({"allowed_ids": [2**31 - 1]}, r"expected each from 0 to 2\*\*31 - 2"),
        ({"bad_words": jnp.ones((1, 9), jnp.int32)}, r"bad_words have \[9\] tokens"),
        ({"bad_words": jnp.ones(3)}, "expected a list of lists of token ids"),
        ({"bad_words": "ab"}, "expected a list of lists of token ids"),
        ({"bad_words": [[]]}, r"bad_words have \[0\] tokens: expected 1 to 8"),
        ({"bad_words": [[1]] * 65}, "65 bad_words: expected at most 64"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
    ],
)
def test_what_can_change_no_logits_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_lists_may_be_arrays():
    array = Sampling(logit_bias=([1], [2.0]), bad_words=jnp.array([[1, 2]], jnp.int32))
    both = (array, Sampling(logit_bias={1: 2}, bad_words=[[1, 2]]))
    first, second = (jax.tree.leaves(controls([one], 1, 40, 40)) for one in both)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    "fields", [{"allowed_ids": [40]}, {"bad_words": [[3, 40]]}, {"logit_bias": {40: 1}}]
)
def test_ids_are_of_the_vocabulary(fields):
    with pytest.raises(ValueError, match=r"40\]: expected each from 0 to 39"):
        controls([Sampling(**fields)], 2, VOCABULARY, VOCABULARY)
