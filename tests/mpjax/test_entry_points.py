"""A request's result does not depend on which function was called, in any KV format."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.evaluation.perplexity import token_scores
from mpjax.generation.prefill import reads_exactly
from mpjax.kernels import KVFormat
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 6
# Sums in another order turn a code to its neighbour, which in 4 bits moves what attends to it.
ROUNDING = 1e-2
LENGTHS = (130, 7, 60)  # the first passes the end of a block of 128


@pytest.mark.parametrize(
    "text", ["KV4", "K4cV4c", *map(in_sweep, ("KV16", "KV8", "KVfp8", "KV2g64"))]
)
def test_all_entry_points_give_the_same_tokens_and_logprobs(two_layers, text):
    lm = dataclasses.replace(two_layers, kv_format=KVFormat.parse(text))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 2048, length).tolist() for length in LENGTHS]
    sampling = [{"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 0}]
    options: dict[str, Any] = {"max_new_tokens": NEW}
    found = mpjax.generate(lm, prompts, sampling=sampling, **options)
    assert found.finish_reasons == ["length"] * 3

    padded = np.zeros((3, max(LENGTHS)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    loop = mpjax.generate_tokens(
        lm.model, padded, jnp.array(LENGTHS), sampling=sampling, kv_format=lm.kv_format, **options
    )
    assert loop.tokens.tolist() == found.tokens
    np.testing.assert_allclose(loop.logprobs, found.logprobs, atol=ROUNDING)

    alone = {"sampling": sampling[1], "seed": 1} | options
    assert "".join(mpjax.stream(lm, prompts[1], **alone)) == found.text[1]
    sizes = {"slots": 2, "max_tokens": 200, "chunk_tokens": 48}
    with mpjax.Engine(lm, **sizes) as engine:  # in pieces, and beside other neighbours
        engine.submit(prompts[2][:40], max_new_tokens=9)
        handles = [
            engine.submit(prompt, sampling=own, seed=row, prompt_logprobs=row == 0, **options)
            for row, (prompt, own) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for handle, tokens, logprobs in zip(handles, found.tokens, found.logprobs, strict=True):
            assert handle.result().tokens == tokens
            np.testing.assert_allclose(handle.logprobs, logprobs, atol=ROUNDING)
    [scores] = token_scores(lm, [np.asarray(prompts[0], np.int32)])
    np.testing.assert_allclose(scores.logprobs, handles[0].prompt_logprobs.logprobs, atol=ROUNDING)


def test_only_what_is_not_quantised_is_read_before_it_is_stored():
    """A fresh step over a quantised prompt would give other tokens than an engine's chunks."""
    assert reads_exactly(KVFormat(16))
    assert not any(map(reads_exactly, map(KVFormat.parse, ("KV8", "KV4", "KVfp8", "K4cV4c"))))
