"""Deterministic mode: the numbers of a request are the same to the bit, however it is computed."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.kernels import KVFormat, UnsupportedError
from tests.eight_devices import run
from tests.models.small import hybrid_model, latent_model
from tests.mpjax.conftest import write_tiny_model
from tests.mpjax.engine.conftest import make_engine, resize

PROMPT, LONGEST = 40, 96  # the most tokens of a prompt, and of a request
DRAWN = {"temperature": 1.0, "stop_ids": ()}


def bits(logprobs):
    return np.asarray(logprobs, np.float32).view(np.uint32).tolist()


def trainer_of(lm):
    """The log-probabilities of a trainer for one row of tokens, padded to a fixed length."""
    score = jax.jit(mpjax.token_logprobs)

    def of_row(tokens):
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(score(lm.model, padded))[0, : len(tokens) - 1]

    return of_row


def check(lm, text, requests, pages, chunk, **how):
    """Requests (prompt, new tokens, the step in which it comes) have the trainer's numbers.

    how: further arguments of the engine.
    """
    trainer = trainer_of(lm)
    # Proposals are accepted where texts repeat themselves.
    sampling = DRAWN | {"temperature": 0.0 if "speculate" in how else 1.0}
    how |= {"max_tokens": LONGEST, "page_size": 16, "chunk_tokens": 128}
    with make_engine(lm, text, **how) as engine:
        resize(engine, pages=pages, chunk=chunk)
        handles, left, number = [], sorted(requests, key=lambda request: request[2]), 0
        while left or engine.has_work:
            while left and left[0][2] <= number:
                prompt, new, _ = left.pop(0)
                options = {"sampling": sampling, "max_new_tokens": new}
                handles.append((prompt, engine.submit(prompt, seed=len(prompt), **options)))
            engine.step()
            number += 1
        assert engine.statistics()["accepted_tokens"] > 0 or "speculate" not in how
    for prompt, handle in handles:
        expected = trainer(prompt + handle.tokens)[len(prompt) - 1 :]
        assert bits(handle.logprobs) == bits(expected)
    return handles


@pytest.fixture(scope="module")
def models(two_layers_folder):
    found = {
        text: mpjax.load(
            two_layers_folder, precision=f"W4A16{text}", dtype="bf16", deterministic=True
        )
        for text in ("KV16", "KV8")
    }
    others = {"recurrent layers": (hybrid_model, "KV16"), "latents": (latent_model, "KV4t")}
    for name, (make, text) in others.items():
        lm = mpjax.LanguageModel(make(vocab_size=2048), None, KVFormat.parse(text), Path(), 16)
        found[name] = lm.in_mode(deterministic=True)
    return found


prompts = st.builds(
    lambda is_shared, length, seed: (
        [7 + i for i in range(20)] * is_shared
        + np.random.default_rng(seed).integers(1, 2000, length).tolist()
    ),
    st.booleans(),
    st.integers(1, PROMPT - 20),
    st.integers(0, 9),
)
batches = st.lists(
    st.tuples(prompts, st.integers(1, 24), st.integers(0, 4)), min_size=1, max_size=6
)


OLD_EMITTER = pytest.mark.skipif(
    "--xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", ""),
    reason="the older emitter of XLA's CPU programs rounds a step by the program around it",
)


@pytest.mark.parametrize(
    "name", ["KV16", "KV8", pytest.param("recurrent layers", marks=OLD_EMITTER), "latents"]
)
@settings(max_examples=3, deadline=None)
@given(
    requests=batches,
    pages=st.sampled_from([9, 40]),
    chunk=st.sampled_from([16, 128]),
)
def test_the_sampler_has_the_trainer_s_bits(models, name, requests, pages, chunk):
    """Behind shared prefixes, chunked, preempted, in any slot and among any neighbours."""
    check(models[name], str(models[name].kv_format), requests, pages, chunk)


def check_uneven(lm, **how):
    """Behind shared prefixes, in chunks of one page, preempted and among others."""
    rng = np.random.default_rng(0)
    shared = [7 + i for i in range(20)]
    requests = [
        (shared * (number % 2) + rng.integers(1, 2000, 5 + 4 * number).tolist(), 24, number // 2)
        for number in range(5)
    ]
    check(lm, "KV8", requests, pages=9, chunk=16, **how)


@pytest.mark.gpu
def test_a_gpu_s_sampler_has_the_trainer_s_bits(tmp_path):
    folder = write_tiny_model(tmp_path / "tiny", layers=2, head_dim=64)
    check_uneven(mpjax.load(folder, precision="W4A16KV8", dtype="bf16", deterministic=True))


def test_a_speculating_sampler_has_the_trainer_s_bits(models):
    check_uneven(models["KV8"], speculate=mpjax.Ngram(k=3, n=1))


def test_a_divided_model_s_sampler_has_the_trainer_s_bits(two_layers_folder):
    module = "tests.mpjax.rollouts.deterministic_on_devices"
    assert run(module, str(two_layers_folder)) == "equal\n"


def test_a_forward_pass_does_not_depend_on_rows_and_padding(models):
    """The trainer's numbers for a row alone, in a batch with padding, and by steps of a cache."""
    lm = models["KV8"]
    tokens = np.random.default_rng(1).integers(1, 2000, (3, 50)).astype(np.int32)
    [own] = mpjax.token_logprobs(lm.model, tokens[1:2, :30])
    score = jax.jit(mpjax.token_logprobs)
    batch = score(lm.for_device, tokens, np.array([50, 30, 9]))
    assert bits(batch[1, :29]) == bits(own)
    drawn = mpjax.generate_tokens(
        lm.for_device, tokens[:, :7], np.full(3, 7), max_new_tokens=5, sampling=DRAWN
    )
    whole = np.concatenate([tokens[:, :7], np.asarray(drawn.tokens)], 1)
    assert bits(drawn.logprobs) == bits(score(lm.model, whole)[:, 6:])


def test_the_mode_has_the_usual_numbers_but_for_rounding(models, two_layers_folder):
    """Log-probabilities and their gradients."""
    lm = models["KV16"]
    usual = lm.in_mode(deterministic=False)
    assert usual.model.deterministic is None
    assert lm.in_mode(deterministic=True) is lm
    tokens = np.random.default_rng(2).integers(1, 2000, (2, 24)).astype(np.int32)
    found = []
    for one in (lm, usual):
        graph, pairs, rest = nnx.split(mpjax.lora(one, 4).model, nnx.LoRAParam, ...)

        def loss(pairs, graph=graph, rest=rest):
            return mpjax.token_logprobs(nnx.merge(graph, pairs, rest), tokens).mean()

        found.append(jax.jit(jax.value_and_grad(loss))(pairs))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-3)
    slopes, expected = (jax.tree.leaves(slope) for _, slope in found)
    largest = max(np.abs(slope).max() for slope in expected)
    assert largest > 0
    for one, other in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05 * largest)


def test_what_cannot_be_deterministic_is_refused(two_layers_folder):
    def load(precision):
        return mpjax.load(two_layers_folder, precision=precision, deterministic=True)

    with pytest.raises(UnsupportedError, match="deterministic: KV2: a token attends to its"):
        load("W16A16KV2")
    with pytest.raises(UnsupportedError, match="KVfp8: a forward pass without a cache has no"):
        load("W16A16KVfp8")
    lm = load("W16A16KV8")
    with pytest.raises(ValueError, match="the cache is KV16, and the model deterministic with KV8"):
        make_engine(lm, "KV16")
    with pytest.raises(ValueError, match="deterministic is 1: expected a bool"):
        mpjax.load(two_layers_folder, deterministic=1)
