"""Arguments of an engine and its requests that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpjax.engine.options import TooLongError
from tests.mpjax.engine.conftest import make_engine, resize


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "the prompt is empty: expected at least one token"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [5000]}, "token id 5000"),
        ({"prompt": [1] * 150, "max_new_tokens": 50}, "150 tokens, and with 50 .* the 192 tokens"),
        ({"sampling": {"temperature": [1.0, 2.0]}}, r"temperature has shape \(2,\): a batch of 1"),
        ({"sampling": {"stop_ids": range(20)}}, "there are 20 stop ids: .* at most 16"),
        ({"priority": 1.5}, "priority is 1.5: expected a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True: expected a whole number"),
        ({"max_new_tokens": 10**30}, f"with {10**30} new ones it would pass the 192"),
        ({"stop": np.array(3)}, "stop has array.3.: expected a string"),
        ({"seed": 2**70}, "seed is 1180591620717411303424: expected an integer from -2.*63 to"),
        ({"seed": [3]}, r"seed is \[3\]: expected an integer"),
        ({"max_new_tokens": -1, "prompt_logprobs": True}, "is -1: expected 0 or more new tokens"),
    ],
)
def test_what_can_never_run_is_refused_when_it_comes(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(**({"prompt": "import"} | arguments))
    assert not engine.has_work
    with pytest.raises(TooLongError):
        engine.submit([1] * 193, max_new_tokens=1)
    with pytest.raises(ValueError, match="handle is 3: expected a Handle, as submit returns it"):
        engine.cancel(3)


@pytest.mark.parametrize("seeds", [3, [1, 2], "ab", [None], [2**63]])
def test_seeds_of_a_batch_are_one_for_each_prompt(engine, seeds):
    with pytest.raises(ValueError, match="seed"):
        engine.generate(["import"], seeds=seeds)
    assert not engine.has_work


def test_a_request_larger_than_the_cache_is_refused(engine):
    resize(engine, pages=4)  # one of which is nowhere
    assert engine.capacity == 3 * 32
    with pytest.raises(TooLongError, match="the prompt's 90 tokens and 8 new ones are too many"):
        engine.submit([1] * 90, max_new_tokens=8)
    assert len(engine.submit([1] * 90, max_new_tokens=7).result().tokens) == 7
    resize(engine, pages=25)


def test_what_an_engine_is_made_with_is_checked(tiny):
    for options, message in (
        ({"slots": 0}, "slots is 0"),
        ({"slots": True}, "slots is True: expected a whole number"),
        ({"max_tokens": 1}, "max_tokens is 1: expected 2 or more"),
        ({"steps": 64}, "steps is 64: expected at most 32"),
        ({"max_tokens": 1000}, "max_tokens is 1000, and the model has 256 positions"),
        ({"max_gap": 0}, "max_gap is 0: expected seconds above 0, inf, or None"),
        ({"max_gap": "1"}, "max_gap is '1': expected seconds"),
        ({"cache_memory": -1}, "cache_memory is -1: expected bytes, or a share"),
        ({"cache_memory": "8GB"}, "cache_memory is '8GB'"),
        ({"cache_memory": 100.0}, "cache_memory is 100.0: a page of 32 tokens takes"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(tiny, **options)
