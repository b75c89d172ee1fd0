from __future__ import annotations

import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import sampling as module
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling, logprobs, pad_sampling, sample

process_logits = jax.jit(module.process_logits)  # compiled once, not operation by operation


def random_logits(batch, vocabulary, seed=0, spread=3.0):
    values = np.random.default_rng(seed).normal(scale=spread, size=(batch, vocabulary))
    return values.astype(np.float32)


def softmax(values):
    values = np.asarray(values, np.float64)
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def oracle(row, seen, temperature, top_k, top_p, min_p, penalty):
    """One row in float64, token by token, from the definitions."""
    row = np.asarray(row, np.float64).copy()
    if penalty is not None:
        for token in np.flatnonzero(seen):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    row /= temperature
    if top_k is not None:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        row[row < kth] = -np.inf
    if top_p is not None:
        probabilities, mass, kept = softmax(row), 0.0, set()
        for token in np.argsort(-row, kind="stable"):
            if mass < top_p:
                kept.add(token)
            mass += probabilities[token]
        row[[token for token in range(len(row)) if token not in kept]] = -np.inf
    if min_p is not None:
        probabilities = softmax(row)
        row[probabilities < min_p * probabilities.max()] = -np.inf
    return row


OFF = {"temperature": 0.6, "top_k": None, "top_p": None, "min_p": None, "penalty": None}
SETTINGS = [
    OFF,
    OFF | {"top_k": 9},
    OFF | {"temperature": 1.7, "top_p": 0.8},
    OFF | {"min_p": 0.07},
    OFF | {"penalty": 1.3},
    OFF | {"top_k": 9, "top_p": 0.8},  # top-p is of what top-k left
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "penalty": 0.7},
]


def to_sampling(penalty, **fields):
    return Sampling(repetition_penalty=penalty, **fields)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_processed_logits_follow_the_definitions(settings):
    logits = random_logits(3, 61)
    seen = np.random.default_rng(1).random((3, 61)) < 0.2
    found = process_logits(jnp.asarray(logits), to_sampling(**settings), jnp.asarray(seen))
    expected = [oracle(row, mask, **settings) for row, mask in zip(logits, seen, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_processed_logits_equal_those_of_transformers(settings):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = random_logits(3, 257, seed=2)
    prompt = np.random.default_rng(3).integers(0, 257, (3, 20))
    seen = np.zeros((3, 257), bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    chain = hf.LogitsProcessorList()  # in the order of GenerationMixin._get_logits_processor
    if settings["penalty"] is not None:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(settings["penalty"]))
    chain.append(hf.TemperatureLogitsWarper(settings["temperature"]))
    if settings["top_k"] is not None:
        chain.append(hf.TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] is not None:
        chain.append(hf.TopPLogitsWarper(settings["top_p"]))
    if settings["min_p"] is not None:
        chain.append(hf.MinPLogitsWarper(settings["min_p"]))
    expected = chain(torch.from_numpy(prompt), torch.from_numpy(logits.copy())).numpy()
    found = process_logits(jnp.asarray(logits), to_sampling(**settings), jnp.asarray(seen))
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


def test_fields_per_row_equal_the_rows_alone():
    logits = jnp.asarray(random_logits(3, 40))
    seen = jnp.asarray(np.random.default_rng(5).random((3, 40)) < 0.3)
    fields: dict[str, Any] = {
        "temperature": [0.5, 1.0, 2.0],
        "top_k": [40, 3, 12],
        "top_p": [0.7, 1.0, 0.9],
        "min_p": [0.0, 0.05, 0.01],
        "repetition_penalty": [1.0, 1.5, 0.8],
    }
    together = process_logits(logits, Sampling(**fields), seen)
    for row in range(3):
        alone = Sampling(**{name: values[row] for name, values in fields.items()})
        expected = process_logits(logits[row : row + 1], alone, seen[row : row + 1])
        np.testing.assert_array_equal(together[row], expected[0])


def test_greedy_takes_the_lowest_token_among_equals_in_any_dtype():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], jnp.bfloat16)
    tokens = sample(logits, row_keys([0, 1]))
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == [1, 0]


def test_greedy_is_one_reduction_and_no_sort_or_random_bits():
    logits, keys = jnp.zeros((2, 16)), row_keys([0, 1])
    names = [e.primitive.name for e in jax.make_jaxpr(sample)(logits, keys, Sampling()).eqns]
    assert names.count("argmax") == 1
    assert len(names) <= 2  # the other may be a conversion


def test_greedy_applies_the_repetition_penalty():
    logits = jnp.asarray([[4.0, 3.0, -1.0], [-1.0, -1.5, -9.0]])
    seen = jnp.asarray([[True, False, False], [True, False, False]])
    tokens = sample(logits, row_keys([0, 1]), Sampling(repetition_penalty=2.0), seen)
    assert tokens.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [0, 0.0, np.zeros(2), [0, 0], jnp.zeros(2), np.float32(0)])
def test_temperature_zero_everywhere_is_greedy(temperature):
    assert Sampling(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1) == Sampling()


def test_rows_with_temperature_zero_are_greedy_among_others():
    logits = jnp.asarray(np.tile(random_logits(1, 50, spread=0.1), (64, 1)))
    temperature = np.where(np.arange(64) % 2 == 0, 0.0, 1.0)
    tokens = np.asarray(sample(logits, row_keys(range(64)), Sampling(temperature=temperature)))
    assert set(tokens[::2]) == {int(np.argmax(logits[0]))}
    assert len(set(tokens[1::2])) > 10
    np.testing.assert_array_equal(
        process_logits(logits, Sampling(temperature=temperature, top_k=2))[::2], logits[::2]
    )


def test_a_temperature_leaf_of_zero_is_greedy():
    logits = jnp.asarray(random_logits(64, 50, spread=0.1))
    sampling = jax.tree.map(lambda leaf: 0.0, Sampling(temperature=1.0))
    tokens = sample(logits, row_keys(range(64)), sampling)
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))


def chi_square_is_small(counts, expected):
    """Below the 99.9 % point of chi-square (Wilson and Hilferty's approximation)."""
    degrees = len(counts) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    return np.sum((counts - expected) ** 2 / expected) < limit


def test_draws_follow_the_distribution():
    draws, logits = 20_000, np.asarray([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.5], np.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (draws, 8))
    sampling = Sampling(temperature=0.8, top_p=0.95, min_p=0.02)
    tokens = sample(rows, row_keys(np.arange(draws)), sampling)
    counts = np.bincount(np.asarray(tokens), minlength=8)
    expected = softmax(oracle(logits, [], 0.8, None, 0.95, 0.02, None)) * draws
    possible = expected > 0
    assert 3 < possible.sum() < 8
    assert not counts[~possible].any()
    assert chi_square_is_small(counts[possible], expected[possible])


def test_the_steps_of_one_row_follow_the_distribution():
    steps = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.arange(1.0, 9.0)), (steps, 8))
    keys = step_keys(jnp.repeat(row_keys([7]), steps), jnp.arange(steps))
    tokens = np.asarray(sample(logits, keys, Sampling(temperature=1.0)))
    assert chi_square_is_small(np.bincount(tokens, minlength=8), steps * np.arange(1, 9) / 36)
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)  # neighbours are independent
    assert chi_square_is_small(
        pairs, steps * np.outer(np.arange(1, 9), np.arange(1, 9)).ravel() / 36**2
    )


def test_a_row_draws_the_same_token_alone_in_a_batch_and_in_another_order():
    logits = jnp.asarray(random_logits(3, 1000, spread=0.5))
    sampling = Sampling(temperature=1.0, top_k=500, top_p=0.95)
    keys = step_keys(row_keys([11, 22, 33]), 5)
    together = sample(logits, keys, sampling)
    order = np.asarray([2, 0, 1])
    np.testing.assert_array_equal(sample(logits[order], keys[order], sampling), together[order])
    for row in range(3):
        alone = sample(logits[row : row + 1], keys[row : row + 1], sampling)
        assert int(alone[0]) == int(together[row])


def test_sampling_of_a_batch_that_is_padded():
    sampling = Sampling([1.0, 0.0], top_k=jnp.asarray([3, 4]), min_p=0.5)
    found = pad_sampling(sampling, 2, 4)
    assert np.asarray(found.temperature).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert np.asarray(found.top_k).tolist() == [3, 4, 4, 4]
    assert (found.min_p, found.top_p, found.repetition_penalty) == (0.5, None, None)
    assert [found.temperature.dtype, found.top_k.dtype] == [np.float32, np.int32]
    assert pad_sampling(Sampling(), 2, 4) == Sampling()
    message = r"^top_k has shape \(4,\): a batch of 2 needs a number or an array of shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        pad_sampling(Sampling(1.0, top_k=[1, 2, 3, 4]), 2, 4)


def test_jit_traces_again_only_when_a_feature_is_switched():
    traces = 0

    @jax.jit
    def draw(logits, keys, sampling):
        nonlocal traces
        traces += 1
        return sample(logits, keys, sampling)

    def trace(**fields):
        draw.trace(jnp.zeros((2, 16)), row_keys([0, 1]), Sampling(**fields))
        return traces

    assert trace(temperature=0.7, top_k=3) == 1
    assert trace(temperature=1, top_k=16) == 1
    assert trace(temperature=np.float32(1.5), top_k=np.int64(1)) == 1
    assert trace(temperature=np.asarray(2.0), top_k=2.0) == 1
    assert trace(temperature=0.7, top_k=3, min_p=0.1) == 2
    assert trace(temperature=0) == trace() == 3


def test_sampling_is_a_pytree_that_rebuilds_without_validation():
    sampling = Sampling(temperature=0.7, top_p=0.9)
    assert jax.tree.leaves(sampling) == [0.7, 0.9]
    assert jax.tree.map(lambda leaf: leaf, sampling) == sampling
    rebuilt = jax.tree.map(lambda leaf: 0, sampling)
    assert (rebuilt.temperature, rebuilt.top_p) == (0, 0)  # not normalised to None
    marks = jax.tree.map(lambda leaf: object(), sampling)
    assert len(jax.tree.leaves(marks)) == 2
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(sampling)]
    assert paths == [".temperature", ".top_p"]
    assert jax.jit(lambda value: value)(sampling).top_p.shape == ()


def test_per_row_sampling_can_be_mapped():
    logits = jnp.asarray(random_logits(2, 30))
    sampling = Sampling(temperature=jnp.asarray([0.5, 2.0]), top_k=jnp.asarray([3, 30]))
    mapped = jax.vmap(lambda row, one: process_logits(row[None], one)[0])(logits, sampling)
    np.testing.assert_array_equal(mapped, process_logits(logits, sampling))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: expected a number that is finite"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": [1.0, -1.0]}, "temperature is"),
        ({"temperature": np.ones((2, 2))}, r"temperature has shape \(2, 2\)"),
        (
            {"temperature": 1.0, "top_p": 0.0},
            "top_p is 0.0: expected a number above 0 and at most 1",
        ),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p is 1.1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0: expected a number of 1 or above"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5: expected a whole number"),
        ({"temperature": 1.0, "top_k": np.inf}, "top_k is inf: expected a whole number"),
        ({"temperature": 1.0, "top_k": jnp.asarray([1.5])}, "expected a whole number"),
        (
            {"temperature": 1.0, "min_p": 1.0},
            "min_p is 1.0: expected a number of 0 or above and below 1",
        ),
        ({"temperature": 1.0, "min_p": -0.5}, "min_p is -0.5"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty is 0.0: expected a number that is finite and",
        ),
        ({"top_p": 0.9}, "top_p is set but temperature is not"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1: expected a number of 0 or above"),
        ({"min_new_tokens": [3, -1]}, "min_new_tokens is .*: expected a number of 0"),
        ({"min_new_tokens": 0.5}, r"min_new_tokens is 0\.5: expected a whole number"),
        ({"stop_ids": [3, -1]}, r"stop_ids are \[3, -1\]: expected each from 0"),
        ({"stop_ids": [0.5]}, "stop_ids are float32 of shape .*: expected a list of token ids"),
        ({"stop_ids": 7}, "stop_ids are .*7.*: expected a list of token ids"),
        ({"stop_ids": "</s>"}, "stop_ids is '</s>': expected an array"),
    ],
)
def test_fields_out_of_range_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_what_ends_a_row_is_no_rule_of_drawing():
    """`split` gives the ids apart, and a minimum in any case, as an argument of one program."""
    usual = Sampling().split((4, 5))
    assert usual == (Sampling(min_new_tokens=0), (4, 5))
    held = Sampling(min_new_tokens=np.array([2, 0]), stop_ids=[7])
    drawn, ids = held.split((4, 5))
    assert drawn.stop_ids is None
    assert (np.asarray(ids).tolist(), ids.dtype) == ([7], np.int32)
    assert jax.tree.structure(drawn) == jax.tree.structure(usual[0])
    padded = pad_sampling(held, 2, 4)
    assert padded.min_new_tokens.tolist() == [2, 0, 0, 0]
    assert np.asarray(padded.stop_ids).tolist() == [7]


def test_arguments_that_do_not_fit_are_errors():
    logits, keys = jnp.zeros((2, 8)), row_keys([0, 1])
    with pytest.raises(ValueError, match="seen is None: repetition_penalty needs"):
        sample(logits, keys, Sampling(repetition_penalty=1.1))
    with pytest.raises(ValueError, match=r"of shape \(2, 7\)"):
        sample(logits, keys, Sampling(repetition_penalty=1.1), jnp.zeros((2, 7), bool))
    with pytest.raises(ValueError, match=r"logits have shape \(8,\)"):
        sample(logits[0], keys)
    with pytest.raises(ValueError, match="expected a typed key for each row"):
        sample(logits, row_keys([0]), Sampling(temperature=1.0))
    with pytest.raises(ValueError, match=r"top_k has shape \(3,\)"):
        sample(logits, keys, Sampling(temperature=1.0, top_k=[1, 2, 3]))


@pytest.mark.parametrize("temperature", [1e-44, 1.2e-38, 1e-37, 1e-30, 1e-6])
def test_a_tiny_temperature_draws_the_most_likely_token(temperature):
    logits = jnp.asarray([[1.0, 5.0, 3.0, 20.0], [-9.0, -1e4, -8.0, -1e9]])
    drawn = sample(logits, row_keys([0, 1]), Sampling(temperature=temperature))
    assert drawn.tolist() == [3, 2]


def test_tokens_ruled_out_by_the_model_are_never_drawn():
    logits = jnp.full((64, 50), -jnp.inf).at[:, 2:4].set(0.0)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.99}, {"top_k": 5, "top_p": 1.0, "min_p": 0.5}):
        tokens = sample(logits, row_keys(range(64)), Sampling(temperature=1.0, **fields))
        assert set(np.asarray(tokens)) == {2, 3}


def test_logprobs_are_of_the_unmodified_distribution():
    logits = random_logits(3, 20)
    tokens = np.asarray([4, 0, 19])
    expected = [math.log(softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    found = logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    pairs = logprobs(jnp.asarray(logits)[None, :2], jnp.asarray(tokens)[None, :2])
    np.testing.assert_allclose(pairs[0], expected[:2], rtol=1e-5)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    expected = [math.log(softmax(row)[token]) for row, token in zip(rounded, tokens, strict=True)]
    found = logprobs(rounded, jnp.asarray(tokens))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        (Sampling(temperature=0.5), Sampling(temperature=0.5)),
        ({"temperature": 1}, Sampling(temperature=1.0)),
        (types.MappingProxyType({"temperature": 0.7, "top_k": 5}), Sampling(0.7, top_k=5)),
        ({"temperature": None, "repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
    ],
)
def test_a_sampling_may_come_as_a_mapping(given, expected):
    assert Sampling.of(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Sampling(0.6, 20, 0.9, repetition_penalty=1.1)),
        ({}, Sampling(0.6, 20, 0.9, repetition_penalty=1.1)),
        (Sampling(), Sampling()),
        ({"temperature": 1}, Sampling(1.0, 20, 0.9, repetition_penalty=1.1)),
        ({"top_k": None, "min_p": 0.1}, Sampling(0.6, None, 0.9, 0.1, 1.1)),
        ({"temperature": 0}, Sampling(repetition_penalty=1.1)),
        ({"temperature": None, "repetition_penalty": None}, Sampling()),
        ({"temperature": [0, 2]}, Sampling([0, 2], 20, 0.9, repetition_penalty=1.1)),
    ],
)
def test_a_mapping_changes_the_usual_sampling(given, expected):
    usual = Sampling(0.6, 20, 0.9, repetition_penalty=1.1)
    found = Sampling.of(given, usual)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_its_text_is_in_words():
    assert str(Sampling()) == "greedy"
    assert str(Sampling(repetition_penalty=1.1)) == "greedy, repetition_penalty 1.1"
    assert str(Sampling(0.6, top_p=0.95)) == "temperature 0.6, top_p 0.95"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.7, r"sampling is 0\.7: expected a Sampling, or a mapping such as {'temperature': 0\.7}"),
        ("greedy", "sampling is 'greedy': expected a Sampling"),
        ([("temperature", 1)], r"sampling is \[\('temperature', 1\)\]: expected a Sampling"),
        ({"temprature": 1}, r"has 'temprature' \(did you mean 'temperature'\?\): expected temp"),
        (
            {"do_sample": True},
            "sampling has 'do_sample': expected temperature, top_k, top_p, min_p",
        ),
        ({1: 2}, "sampling has 1: expected temperature"),
        ({"temperature": "hot"}, "temperature is 'hot': expected a number or an array"),
        ({"temperature": 1, "top_k": "5"}, "top_k is '5': expected a number or an array"),
        ({"temperature": [[1]]}, r"temperature has shape \(1, 1\)"),
        ({"temperature": [1, [2]]}, r"temperature is \[1, \[2\]\]: expected a number"),
        ({"temperature": {}}, "temperature is {}: expected a number"),
        ({"temperature": 10**400}, r"temperature is 1000.*: expected a number"),
        ({"temperature": -1}, r"temperature is -1\.0: expected a number that is finite"),
    ],
)
def test_what_is_no_sampling_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling.of(given)


def test_a_mapping_draws_as_a_sampling_does():
    """Also in a program whose argument it is: `jit` takes mappings apart."""
    logits, keys = random_logits(4, 32), row_keys([1, 2, 3, 4])
    given = {"temperature": 0.8, "top_p": 0.9}
    expected = sample(jnp.asarray(logits), keys, Sampling(**given))
    np.testing.assert_array_equal(sample(logits.tolist(), keys, given), expected)
    np.testing.assert_array_equal(jax.jit(sample)(jnp.asarray(logits), keys, given), expected)
    np.testing.assert_array_equal(
        process_logits(jnp.asarray(logits), given),
        process_logits(jnp.asarray(logits), Sampling(**given)),
    )


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
