"""The draw of the next token: filters, penalties, randomness, log-probabilities and ends."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpjax.kernels.thresholds.api import threshold
from mpjax.sampling import draw as module
from mpjax.sampling.draw import TOP_LOGPROBS, Draw, draw, is_end, logprobs
from mpjax.sampling.settings import RowSettings, Sampling

process_logits = jax.jit(module.process_logits)  # compiled once, not operation by operation
compiled = jax.jit(draw, static_argnames="divided")


def random_logits(batch, vocabulary, seed=0, spread=3.0):
    values = np.random.default_rng(seed).normal(scale=spread, size=(batch, vocabulary))
    return values.astype(np.float32)


def rows_of(rows, seeds=None, **fields):
    """The settings of rows of one Sampling."""
    return RowSettings.of([Sampling(**fields)], rows, seeds=seeds)


def drawn(logits, seeds=None, counts=0, **fields):
    """The tokens of rows of one Sampling."""
    own = rows_of(len(logits), seeds, **fields)
    counts = np.full(len(logits), counts, np.int32)
    return np.asarray(compiled(jnp.asarray(logits), own, counts).tokens)


def processed(logits, **fields):
    return process_logits(jnp.asarray(logits), rows_of(len(logits), **fields))


def softmax(values):
    values = np.asarray(values, np.float64)
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


OFF = {"temperature": 0.6, "top_k": None, "top_p": None, "min_p": None}
SETTINGS = [
    OFF,
    OFF | {"top_k": 9},
    OFF | {"temperature": 1.7, "top_p": 0.8},
    OFF | {"min_p": 0.07},
    OFF | {"top_k": 9, "top_p": 0.8},  # top-p is of what top-k left
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_processed_logits_equal_those_of_transformers(fields):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = random_logits(3, 257, seed=2)
    prompt = np.random.default_rng(3).integers(0, 257, (3, 20))
    chain = hf.LogitsProcessorList()  # in the order of GenerationMixin._get_logits_processor
    chain.append(hf.TemperatureLogitsWarper(fields["temperature"]))
    if fields["top_k"] is not None:
        chain.append(hf.TopKLogitsWarper(fields["top_k"]))
    if fields["top_p"] is not None:
        chain.append(hf.TopPLogitsWarper(fields["top_p"]))
    if fields["min_p"] is not None:
        chain.append(hf.MinPLogitsWarper(fields["min_p"]))
    expected = chain(torch.from_numpy(prompt), torch.from_numpy(logits.copy())).numpy()
    found = processed(logits, **fields)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_the_order_of_the_steps_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, GenerationMixin

    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.2
    )
    config._eos_token_tensor = None
    mixin: Any = GenerationMixin()
    mixin.config = types.SimpleNamespace(is_encoder_decoder=False)
    prompt = torch.zeros((1, 1), dtype=torch.long)
    chain = mixin._get_logits_processor(
        config, input_ids_seq_length=1, encoder_input_ids=prompt, device="cpu"
    )
    names = [type(step).__name__.split("Logits")[0] for step in chain]
    assert names == ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]


ROWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.7},
]


@pytest.mark.parametrize("rows", [ROWS, *([ROWS[0], one] * 3 for one in ROWS[1:])])
@pytest.mark.parametrize("varied", [False, True])
def test_each_row_is_drawn_as_it_would_be_alone(rows, varied):
    """All settings together, and each as the only one; also where a program looks for filters."""
    logits = jnp.asarray(random_logits(len(rows), 40, spread=2.0))
    counts = np.arange(len(rows), dtype=np.int32)
    seeds = 7 + counts
    together = RowSettings.of([Sampling(**one) for one in rows], len(rows), seeds=seeds)
    together = together.filled(8) if varied else together
    found = compiled(logits, together, counts)
    for row, fields in enumerate(rows):
        own = slice(row, row + 1)
        alone = rows_of(1, seeds[own], **fields)
        expected = compiled(logits[own], alone, counts[own]).tokens
        assert found.tokens[own].tolist() == expected.tolist(), fields
    np.testing.assert_allclose(found.logprobs, logprobs(logits, found.tokens), rtol=1e-6)
    divided = compiled(logits, together, counts, divided=True)
    np.testing.assert_array_equal(divided.tokens, found.tokens)
    np.testing.assert_allclose(divided.logprobs, found.logprobs, rtol=1e-5)


def test_greedy_takes_the_lowest_token_among_equals_in_any_dtype():
    tokens = drawn(jnp.asarray([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], jnp.bfloat16))
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [1, 0])


def test_greedy_rows_are_one_reduction_without_random_bits():
    own = rows_of(2).likeliest
    traced = str(jax.make_jaxpr(draw)(jnp.zeros((2, 16)), own, np.zeros(2, np.int32)))
    assert "random" not in traced
    assert "argmax" not in traced
    assert "cond" not in traced


def chi_square_is_small(counts, expected):
    """Below the 99.9 % point of chi-square (Wilson and Hilferty's approximation)."""
    degrees = len(counts) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    return np.sum((counts - expected) ** 2 / expected) < limit


def test_draws_follow_the_distribution():
    draws, logits = 20_000, np.asarray([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.5], np.float32)
    fields = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02}
    tokens = drawn(jnp.broadcast_to(jnp.asarray(logits), (draws, 8)), **fields)
    counts = np.bincount(tokens, minlength=8)
    expected = softmax(processed(logits[None], **fields)[0]) * draws
    possible = expected > 0
    assert 3 < possible.sum() < 8
    assert not counts[~possible].any()
    assert chi_square_is_small(counts[possible], expected[possible])


def test_the_steps_of_one_row_follow_the_distribution():
    steps = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.arange(1.0, 9.0)), (steps, 8))
    own = rows_of(steps, np.full(steps, 7), temperature=1.0)
    tokens = np.asarray(compiled(logits, own, np.arange(steps, dtype=np.int32)).tokens)
    assert chi_square_is_small(np.bincount(tokens, minlength=8), steps * np.arange(1, 9) / 36)
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)  # neighbours are independent
    assert chi_square_is_small(
        pairs, steps * np.outer(np.arange(1, 9), np.arange(1, 9)).ravel() / 36**2
    )


@pytest.mark.parametrize("temperature", [1e-44, 1.2e-38, 1e-37, 1e-30, 1e-6])
def test_a_tiny_temperature_draws_the_most_likely_token(temperature):
    logits = jnp.asarray([[1.0, 5.0, 3.0, 20.0], [-9.0, -1e4, -8.0, -1e9]])
    assert drawn(logits, temperature=temperature).tolist() == [3, 2]


def test_tokens_ruled_out_by_the_model_are_never_drawn():
    logits = jnp.full((64, 50), -jnp.inf).at[:, 2:4].set(0.0)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.99}, {"top_k": 5, "top_p": 1.0, "min_p": 0.5}):
        assert set(drawn(logits, temperature=1.0, **fields)) == {2, 3}


def test_rows_without_a_filter_are_not_searched(monkeypatch):
    """A greedy row, one whose top-k and top-p keep all, and one that has both filters."""
    wanted = []

    def search(numbers, counts, weights=None, *, implementation):
        wanted.append(counts[:, 0].tolist())
        return jnp.full((3, 1), -jnp.inf)

    monkeypatch.setattr(module, "threshold", search)
    fields = {"temperature": [0.0, 1.0, 1.0], "top_k": [2, 9, 2], "top_p": [0.5, 1.0, 0.5]}
    module.process_logits(jnp.zeros((3, 9)), rows_of(3, **fields))
    assert wanted == [[0, 0, 2], [0, 0, 2**29]]


def test_logits_in_parts_are_searched_without_a_kernel(monkeypatch):
    """The draws are the same, and the search is one that XLA can divide."""
    logits, none = jnp.asarray(random_logits(4, 300)), np.zeros(4, np.int32)
    own = rows_of(4, temperature=1.3, top_k=[5, 40, 300, 9], top_p=[0.9, 0.5, 0.99, 1.0])
    whole = draw(logits, own, none).tokens
    chosen = []

    def search(*arguments, implementation):
        chosen.append(implementation)
        return threshold(*arguments, implementation=implementation)

    monkeypatch.setattr(module, "threshold", search)
    np.testing.assert_array_equal(draw(logits, own, none, divided=True).tokens, whole)
    assert chosen == ["reference"] * 2


@settings(max_examples=100, deadline=None)
@given(
    arrays.arrays(np.float32, (2, 23), elements=st.sampled_from([-1.5, 0.0, 0.5, 2.0, 4.25])),
    st.integers(1, 23),
    st.floats(0.01, 0.99),
)
def test_top_k_and_top_p_keep_what_a_sort_keeps(logits, top_k, top_p):
    """The rule token by token: the fewest of the likeliest, and those that tie with the last."""
    found = np.isfinite(processed(logits, temperature=1.0, top_k=top_k, top_p=top_p))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        rest = np.where(row >= np.sort(row)[-top_k], row, -np.inf)
        order = np.argsort(-rest)
        above = np.concatenate([[0], np.cumsum(softmax(rest)[order])[:-1]])
        least = row[order[above < np.float32(top_p) - 1e-6]].min()
        most = row[order[above < np.float32(top_p) + 1e-6]].min()
        assert row[kept].min() in (least, most)
        np.testing.assert_array_equal(kept, row >= row[kept].min())


def test_filters_that_keep_the_most_likely_token():
    logits = random_logits(4, 100)
    for fields in ({"top_p": 1e-30}, {"top_p": 1e-60}, {"top_k": 1}, {"min_p": 0.999999}):
        kept = np.isfinite(processed(logits, temperature=1.0, **fields))
        np.testing.assert_array_equal(np.argwhere(kept)[:, 1], logits.argmax(-1))


def test_tokens_that_sum_to_top_p_need_no_other_but_ties():
    ties = np.asarray([[3.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    for fields in ({"top_k": 2}, {"top_p": 0.75}):
        kept = np.isfinite(processed(ties, temperature=1.0, **fields))
        assert kept.tolist() == [[True, True, True, True, False]]
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.125, 0.125]]))
    with jax.default_device(jax.devices("cpu")[0]):
        probabilities = jax.nn.softmax(logits)[0].tolist()
        assert probabilities == [0.5, 0.25, 0.125, 0.125], "choose others that are exact"
        for top_p, count in ((0.5, 1), (0.75, 2)):
            assert np.isfinite(processed(logits, temperature=1.0, top_p=top_p)).sum() == count


def test_short_rows_draw_no_stop_id():
    """A minimum of three: the third token is the first that may be a stop id."""
    logits = jnp.tile(jnp.asarray([0.0, 1, 9, 2]), (3, 1))
    for number in (8, 24):  # few stop ids are compared one by one
        own = RowSettings.of([Sampling(min_new_tokens=3, stop_ids=[2])], 3)
        filled = own.filled(number).likeliest
        own = dataclasses.replace(filled, min_new_tokens=own.min_new_tokens)
        found = compiled(logits, own, jnp.asarray([1, 2, 3]))
        assert found.tokens.tolist() == [3, 3, 2]
        np.testing.assert_allclose(found.logprobs, logprobs(logits, found.tokens), rtol=1e-6)


def test_rows_end_for_three_reasons():
    own = RowSettings.of([Sampling(stop_ids=[5])], 4, max_new_tokens=np.array([9, 2, 9, 9]))
    found = Draw(jnp.array([5, 1, 1, 1]), jnp.array([0.0, 0.0, jnp.nan, 0.0]))
    assert is_end(found, own, jnp.full(4, 2)).tolist() == [True, True, True, False]


def test_top_logprobs_are_computed_where_a_row_wants_some():
    logits = random_logits(6, 40)
    logits[1, ::3], logits[2, 5:] = logits[1, 0], -np.inf  # equal logits, and few finite ones
    own, counts = RowSettings.of([Sampling()], 6).filled(8), np.zeros(6, np.int32)
    assert compiled(logits, own.likeliest, counts).top_logprobs is None
    assert not compiled(logits, own, counts).top_logprobs[0].any()
    own.top_logprobs[2] = 3
    ids, found = compiled(logits, own, counts).top_logprobs
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_LOGPROBS]
    np.testing.assert_array_equal(ids, order)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), order, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_of_the_unmodified_distribution(dtype):
    logits, tokens = jnp.asarray(random_logits(3, 20), dtype), np.asarray([4, 0, 19])
    expected = [math.log(softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    found = logprobs(logits, jnp.asarray(tokens))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    pairs = logprobs(logits[None, :2], jnp.asarray(tokens)[None, :2])
    np.testing.assert_allclose(pairs[0], expected[:2], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 7])
def test_logprobs_are_nan_where_logits_are_no_numbers(value, place):
    """Every token of the row has NaN; the rows beside it are as they were."""
    logits = np.repeat(random_logits(1, 20), 2, 0)
    logits[1, place] = value
    found = np.asarray(
        [[float(logprobs(jnp.asarray(row), jnp.int32(i))) for i in (0, 7, 19)] for row in logits]
    )
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_what_a_model_rules_out_is_a_number():
    logits = jnp.asarray([[0.0, -jnp.inf, 0.0]])
    np.testing.assert_allclose(logprobs(logits, jnp.asarray([0])), np.log(0.5), rtol=1e-6)
    assert logprobs(logits, jnp.asarray([1])).tolist() == [-np.inf]
