from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.bench import case_state
from mpjax.bench.random_model import random_model
from mpjax.generation.decoding import decode_program
from mpjax.kernels import KVFormat
from mpjax.memory import DeviceMemoryError
from mpjax.models import Qwen3
from tests.mpjax.bench.rows import SMALL_MODEL


def model():
    return mpjax.LanguageModel(random_model(Qwen3, SMALL_MODEL, None), None, KVFormat(16), Path())


def filled(lm):
    loop = case_state.empty_loop(lm, case_state.endless(2, 4), 150, 4)
    return case_state.fill(loop, 140)


def test_the_loop_of_a_filled_case_decodes_on_from_its_context():
    lm = model()
    loop = case_state.rewind(filled(lm), 140)
    cache = loop.state.cache
    assert cache.lengths.tolist() == [140, 140]
    written = np.abs(np.asarray(cache.layers[0].keys, "float32")).sum((1, 3)) > 0
    assert written.sum() == 2 * 140
    loop = decode_program(lm.model, loop)(lm.model, loop, jnp.int32(4))
    assert loop.state.cache.lengths.tolist() == [143, 143]
    assert loop.state.counts.tolist() == [4, 4]


def test_each_call_decodes_again_from_the_prompt():
    lm = model()
    loop = filled(lm)
    program = decode_program(lm.model, loop)
    decoding = case_state.CaseDecoding(lm.model, loop, 140)
    first, second = (np.array(decoding.run(program, jnp.int32(4))) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert decoding.loop.state.cache.lengths.tolist() == [143, 143]
    decoding.act(lambda loop: loop)
    assert decoding.loop.state.cache.lengths.tolist() == [140, 140]


def test_a_cache_that_does_not_fit_is_refused():
    lm = model()
    with pytest.raises(DeviceMemoryError, match=r"a KV16 cache for 9 × 1000000000 tokens"):
        case_state.empty_loop(lm, case_state.endless(9, 1), 10**9, 1)
