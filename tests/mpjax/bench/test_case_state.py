from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.bench import case_state
from mpjax.bench.random_model import random_model
from mpjax.decoding import decode_program
from mpjax.decoding_state import Limits
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import Qwen3
from mpjax.sampling import Sampling
from tests.mpjax.bench.rows import SMALL_MODEL


def model():
    return mpjax.LanguageModel(random_model(Qwen3, SMALL_MODEL, None), None, KVFormat(16), Path())


def test_the_state_of_a_filled_case_decodes_on_from_its_context():
    lm = model()
    state = case_state.fill(case_state.empty_state(lm, 2, 150, 4), 140)
    state = case_state.rewind(state, 140)
    assert state.cache.lengths.tolist() == [140, 140]
    written = np.abs(np.asarray(state.cache.layers[0].keys, "float32")).sum((1, 3)) > 0
    assert written.sum() == 2 * 140
    ends = np.full(2, 4, np.int32)
    limits = Limits(jnp.zeros(0, "int32"), ends, room=4)
    arguments = lm.model, state, Sampling(), limits, jnp.int32(4)
    state = decode_program(lm.model, state)(*arguments)
    assert state.cache.lengths.tolist() == [143, 143]
    assert state.counts.tolist() == [4, 4]


def test_each_call_decodes_again_from_the_prompt():
    lm = model()
    limits = Limits.of(2, (), 4, 4)
    state = case_state.fill(case_state.empty_state(lm, 2, 150, 4), 140)
    decoding = case_state.CaseDecoding(lm.model, state, 140, limits)
    program = decode_program(lm.model, state)
    first, second = (np.array(decoding.run(program, jnp.int32(4))) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert decoding.state.cache.lengths.tolist() == [143, 143]
    decoding.act(lambda state: state)
    assert decoding.state.cache.lengths.tolist() == [140, 140]


def test_a_cache_that_does_not_fit_is_refused():
    lm = model()
    with pytest.raises(DeviceMemoryError, match=r"a KV16 cache for 9 × 1000000000 tokens"):
        case_state.empty_state(lm, 9, 10**9, 1)
