"""Sampling, which people write, and RowSettings, which programs take."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.sampling.settings import UNLIMITED, RowSettings, Sampling, read_samplings
from mpjax.sampling.token_lists import NO_ID


@pytest.mark.parametrize("temperature", [0, 0.0, np.zeros(2), [0, 0], jnp.zeros(2), np.float32(0)])
def test_temperature_zero_everywhere_is_greedy(temperature):
    assert Sampling(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1) == Sampling()


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: expected a number that is finite"),
        ({"temperature": [1.0, -1.0]}, "temperature is"),
        ({"temperature": np.ones((2, 2))}, r"temperature has shape \(2, 2\)"),
        (
            {"temperature": 1.0, "top_p": 0.0},
            "top_p is 0.0: expected a number above 0 and at most 1",
        ),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0: expected a number of 1 or above"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5: expected a whole number"),
        ({"temperature": 1.0, "top_k": jnp.asarray([1.5])}, "expected a whole number"),
        (
            {"temperature": 1.0, "min_p": 1.0},
            "min_p is 1.0: expected a number of 0 or above and below 1",
        ),
        (
            {"repetition_penalty": 0},
            "repetition_penalty is 0.0: expected a number that is finite and",
        ),
        ({"top_p": 0.9}, "top_p is set but temperature is not"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1: expected a number of 0 or above"),
        ({"min_new_tokens": 0.5}, r"min_new_tokens is 0\.5: expected a whole number"),
        ({"stop_ids": [3, -1]}, r"stop_ids are \[3, -1\]: expected each from 0"),
        ({"stop_ids": 7}, "stop_ids are 7: expected a list of token ids"),
    ],
)
def test_fields_out_of_range_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


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
        ([("temperature", 1)], r"sampling is \[\('temperature', 1\)\]: expected a Sampling"),
        ({"temprature": 1}, r"has 'temprature' \(did you mean 'temperature'\?\): expected temp"),
        (
            {"do_sample": True},
            "sampling has 'do_sample': expected temperature, top_k, top_p, min_p",
        ),
        ({"temperature": "hot"}, "temperature is 'hot': expected a number or an array"),
        ({"temperature": [[1]]}, r"temperature has shape \(1, 1\)"),
        ({"temperature": 10**400}, r"temperature is 1000.*: expected a number"),
    ],
)
def test_what_is_no_sampling_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling.of(given)


def test_large_numbers_keep_all_tokens():
    for top_k in (3 * 10**9, [2**32 + 2], jnp.asarray([7.0])):
        assert np.all(np.asarray(Sampling(temperature=1.0, top_k=top_k).top_k) > 5)
    assert RowSettings.of([Sampling()], 1, max_new_tokens=2**40).max_new_tokens.tolist() == [
        UNLIMITED
    ]


def test_settings_of_rows_are_arrays_of_what_is_switched_on():
    own = RowSettings.of([Sampling([0.5, 0], top_k=3)], 2, max_new_tokens=9, stop_ids=[4])
    assert (own.temperature.tolist(), own.top_k.tolist()) == ([0.5, 0.0], [3, 3])
    assert own.top_p is own.min_p is own.top_logprobs is None
    assert (own.min_new_tokens.tolist(), own.max_new_tokens.tolist()) == ([0, 0], [9, 9])
    assert own.stop_ids.tolist() == [[4, *[NO_ID] * 7]] * 2
    assert own.key_words.tolist() == [[0, 0], [0, 1]]
    assert not own.greedy
    assert RowSettings.of([Sampling(repetition_penalty=2.0)], 2).greedy


def test_each_row_may_have_a_sampling_of_its_own():
    each = read_samplings([{"temperature": 0.7, "stop_ids": [1, 2]}, None, Sampling()], 3)
    own = RowSettings.of(each, 3, stop_ids=[9], seeds=[5, 6, 7])
    np.testing.assert_allclose(own.temperature, [0.7, 0, 0])
    assert own.stop_ids[:, :3].tolist() == [[1, 2, NO_ID], [9, NO_ID, NO_ID], [9, NO_ID, NO_ID]]
    assert own.key_words[:, 1].tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="sampling has 2 entries for a batch of 3"):
        read_samplings([None, None], 3)
    with pytest.raises(
        ValueError, match=r"top_k has shape \(3,\): .* of its own settings a number"
    ):
        RowSettings.of([Sampling(1.0, top_k=[1, 2, 3]), *each[1:]], 3)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"temperature": 1.0, "top_k": [1, 2, 3]}, {}, r"top_k has shape \(3,\): a batch of 2"),
        ({"stop_ids": [3, 50]}, {"vocabulary": 50}, r"stop_ids are \[3, 50\]: .* 0 to 49"),
        ({}, {"seeds": [1]}, "there are 1 seeds for a batch of 2"),
    ],
)
def test_rows_without_fitting_settings_are_refused(fields, options, message):
    with pytest.raises(ValueError, match=message):
        RowSettings.of([Sampling(**fields)], 2, **options)


def test_a_filled_row_changes_nothing_else():
    own = RowSettings.of([Sampling(temperature=0.5)], 2, stop_ids=[3]).filled(16)
    assert own.varied
    assert (own.top_k[0], own.top_p[0], own.min_p[0]) == (UNLIMITED, 1, 0)
    assert (own.stop_ids.shape, own.top_logprobs.tolist()) == ((2, 16), [0, 0])
    assert len(jax.tree.leaves(own)) == len(jax.tree.leaves(own.rows(np.array([1])))) == 9
    bare = own.likeliest
    assert bare.greedy
    assert len(jax.tree.leaves(bare)) == 3


def test_settings_may_be_traced():
    @jax.jit
    def spread(sampling, ids):
        own = RowSettings.of([sampling], 3, stop_ids=ids)
        return own.temperature, own.stop_ids

    temperature, ids = spread(Sampling(temperature=jnp.float32(0.5)), jnp.array([1, 2]))
    assert temperature.tolist() == [0.5] * 3
    assert ids[:, :2].tolist() == [[1, 2]] * 3


def test_stop_ids_end_the_rows_that_have_them():
    """Few are compared one by one, many at once."""
    for number in (2, 40):
        own = RowSettings.of([Sampling(stop_ids=range(number)), Sampling(stop_ids=[7])], 2)
        assert own.stops(jnp.array([[1], [1]])).tolist() == [[True], [False]]
        found = np.asarray(own.stops(jnp.arange(50)[None]))
        assert found.sum(1).tolist() == [number, 1]
