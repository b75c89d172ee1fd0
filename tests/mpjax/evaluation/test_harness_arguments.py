from __future__ import annotations

import pytest

from mpjax.evaluation.harness_arguments import generation_arguments
from mpjax.sampling.settings import Sampling


@pytest.mark.parametrize(
    ("kwargs", "sampling"),
    [
        ({}, Sampling()),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, Sampling()),
        ({"temperature": 0.0, "top_k": 5}, Sampling()),
        ({"temperature": 0.7, "top_p": 0.9}, Sampling(temperature=0.7, top_p=0.9)),
        ({"do_sample": True, "min_p": 0.1}, Sampling(temperature=1.0, min_p=0.1)),
        ({"do_sample": True, "temperature": 0.2}, Sampling(temperature=0.2)),
        ({"do_sample": None, "repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"num_beams": 1}, Sampling()),
        # A filter that is switched off, in ways that Sampling refuses.
        ({"do_sample": False, "top_k": 0}, Sampling()),
        ({"do_sample": False, "top_p": 0.0, "min_p": 1.0}, Sampling()),
        ({"temperature": 0, "top_k": -1, "top_p": 0.0}, Sampling()),
        ({"temperature": 1, "top_k": -1}, Sampling(temperature=1.0)),
        ({"temperature": 1, "top_k": 0, "top_p": 0.9}, Sampling(temperature=1.0, top_p=0.9)),
    ],
)
def test_how_tokens_are_drawn(kwargs, sampling):
    assert generation_arguments(kwargs, 256).sampling == sampling


@pytest.mark.parametrize(
    ("until", "stop"),
    [("\n", ("\n",)), (["Q:", "", "\n\n"], ("Q:", "\n\n")), ([], ()), ("", ()), (None, ())],
)
def test_where_a_text_ends(until, stop):
    assert generation_arguments({"until": until}, 256).stop == stop


@pytest.mark.parametrize(
    ("kwargs", "tokens"),
    [
        ({}, 256),
        ({"max_gen_toks": 5}, 5),
        ({"max_new_tokens": 6.0}, 6),
        ({"max_tokens": 3, "max_gen_toks": 9}, 9),
        ({"max_gen_toks": None, "max_completion_tokens": 4}, 4),
    ],
)
def test_how_many_tokens(kwargs, tokens):
    found = generation_arguments(kwargs, 256).max_new_tokens
    assert (found, type(found)) == (tokens, int)


def test_equal_arguments_are_one_key():
    first = generation_arguments({"until": ["\n"], "max_gen_toks": 8, "temperature": 0.5}, 1)
    second = generation_arguments(
        {"temperature": 0.5, "do_sample": True, "until": "\n", "max_tokens": 8}, 2
    )
    assert len({first, second}) == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 10, "until": "x"}, "have num_beams=10: expected until, "),
        ({"typical_p": 0.9, "num_beams": 4}, r"have num_beams=4, typical_p=0\.9: expected"),
        ({"typical_p": 0.9, "num_beams": 1}, r"have typical_p=0\.9: expected"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1, "top_k": -2}, "top_k is .*: expected a number of 1 or above"),
        ({"temperature": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": "hot"}, "temperature is 'hot': expected a number"),
        ({"until": 5}, "stop has 5: expected a string"),
        ({"until": ["\n", 5]}, "stop has 5: expected a string"),
        ({"max_gen_toks": "many"}, "max_gen_toks is 'many': expected 1 or more, a whole number"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens is 2\.5: expected 1 or more, a whole number"),
    ],
)
def test_what_it_can_not_do_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        generation_arguments(kwargs, 256)
