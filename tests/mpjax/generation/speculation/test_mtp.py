"""A model's own head proposes; what is generated stays the model's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.kernels import KVFormat
from mpjax.models.parameters import find
from tests.models.small import hybrid_model, logits_of, mtp_model
from tests.mpjax.engine.conftest import make_engine, require_order, resize
from tests.mpjax.generation.speculation.test_draft import HOT, PROMPT, ROWS, WORDS, surprise
from tests.mpjax.generation.speculation.test_states import NEW, TEXTS, prompts
from tests.sweeps import in_sweep

__all__ = ["prompts"]
pytestmark = pytest.mark.usefixtures("exact_products")


def agreeing(model, share):
    """The model with layers of less weight, and a head that sees little but the newest token.

    share: of the layers' outputs. The less, the more often both have one opinion. In place.
    """
    for place in model.linear_places(model.config):
        if place.path.endswith(("attention.output", "out", "mlp.down", "experts.down")):
            kernel = find(model, place.path).kernel
            kernel.set_value(share * kernel.get_value())
    joint = find(model, f"layers.{model.config.depth}.attention.joint")
    joint.set_value(jnp.eye(*joint.get_value().shape) + 0.02 * joint.get_value())
    return model


@pytest.mark.parametrize(
    ("experts", "kv"), [(False, "KV8"), (True, "KV16"), (False, "KV4c"), in_sweep(True, "KV8")]
)
def test_greedy_tokens_are_those_of_plain_decoding(prompts, experts, kv):
    """Over the end of a block of 128 tokens, and with rows that are drawn beside them."""
    model = agreeing(mtp_model(experts=experts), 0.3)
    if kv == "KV4c":
        tokens, lengths = prompts
        prompts = jnp.concatenate([jnp.tile(tokens[:, :18], (1, 5)), tokens], 1), lengths + 90
    sampling = {"temperature": np.array([0, 0.7, 1.5, 0]), "stop_ids": ()}
    run = functools.partial(
        generate_tokens, model, *prompts, max_new_tokens=NEW, kv_format=kv, sampling=sampling
    )
    plain, found = run(), run(speculate="mtp")
    greedy = np.array([0, 3])
    np.testing.assert_array_equal(found.tokens[greedy], plain.tokens[greedy])
    done = found.speculated
    accepted, proposed = int(done.accepted.sum()), int(done.proposed.sum())
    assert NEW // 3 < accepted < proposed
    np.testing.assert_array_equal(done.steps + done.accepted, NEW - 1)


def test_it_runs_under_jit(prompts):
    model = agreeing(mtp_model(), 0.3)
    run = functools.partial(generate_tokens, max_new_tokens=8, speculate=mpjax.MTP(k=2))
    found = jax.jit(run)(model, *prompts)
    expected = generate_tokens(model, *prompts, max_new_tokens=8)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert int(found.speculated.accepted.sum()) > 0


def test_texts_have_the_models_distribution():
    """Of all texts of three words."""
    model = agreeing(mtp_model(1, vocab_size=WORDS), 0.7)
    found = generate_tokens(
        model,
        jnp.tile(jnp.array([PROMPT]), (ROWS, 1)),
        jnp.full(ROWS, len(PROMPT)),
        max_new_tokens=3,
        sampling={"temperature": HOT, "stop_ids": ()},
        speculate="mtp:2",
    )
    texts = np.array([(*PROMPT, *rest) for rest in itertools.product(range(WORDS), repeat=3)])
    logits = np.asarray(logits_of(model, jnp.asarray(texts)), np.float64)
    logits = logits[:, len(PROMPT) - 1 : -1] / HOT
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    each = np.take_along_axis(logits, texts[:, len(PROMPT) :, None], -1)[..., 0]
    chances = np.exp(each.sum(-1))
    assert abs(surprise(found.tokens, chances)) < 5
    assert surprise(found.tokens, np.roll(chances, 1)) > 50, "the test can't fail"
    done = found.speculated
    assert 200 < int(done.accepted.sum()) < int(done.proposed.sum()) - 200


@pytest.mark.parametrize(("kv", "constrained"), [("KV8", False), in_sweep("KV16", True)])
def test_an_engine_speculates_where_rows_come_go_and_are_read_again(tiny, kv, constrained):
    """Also behind shared prefixes, and for a row with a constraint."""
    model = agreeing(mtp_model(vocab_size=tiny.config.vocab_size), 0.3)
    lm = dataclasses.replace(tiny, model=model, kv_format=KVFormat(16))
    common = [1 + i * i % 29 for i in range(40)]
    words = mpjax.Regex("([a-z]{1,5} ){3,}")
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 0, "stop_ids": ()}}
    asked = [(common + text, {}) for text in TEXTS[:2]]
    if constrained:
        asked.append((asked[0][0], {"constraint": words}))
    sizes = {"slots": 2, "chunk_tokens": 16, "text": kv}
    with make_engine(lm, **sizes) as engine:
        plain = [engine.submit(text, **options, **how).result() for text, how in asked]
    with make_engine(lm, speculate="mtp", **sizes) as engine:
        resize(engine, pages=5)
        handles = [engine.submit(text, **options, **how) for text, how in asked * 2]
        while engine.has_work:
            engine.step()
            require_order(engine._runner.planner)
        for handle, expected in zip(handles, plain * 2, strict=True):
            assert handle.tokens == expected.tokens
        numbers = engine.statistics()
    assert numbers["preemptions"] > 0
    assert numbers["shared_tokens"] > 0
    assert NEW // 2 < numbers["accepted_tokens"] < numbers["proposed_tokens"]
    assert not constrained or re.match("[a-z]{1,5}", handles[2].text)


def test_a_row_is_proposed_the_same_wherever_its_prompt_was(tiny):
    """Read at once or in pieces, and shared with an earlier row that went on in another way."""
    model = agreeing(mtp_model(vocab_size=tiny.config.vocab_size), 0.3)
    lm = dataclasses.replace(tiny, model=model)
    prompt = [1 + i * i % 29 for i in range(70)]
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 0, "stop_ids": ()}}
    counts = []
    for before, chunk in (((), 80), ((), 16), (([*prompt[:64], 3, 5, 7, 2, 8],), 16)):
        with make_engine(lm, speculate="mtp", chunk_tokens=chunk) as engine:
            for text in before:
                engine.submit(text, **options).result()
            found = engine.submit(prompt, **options).result()
            assert (found.shared_tokens > 0) == bool(before)
            counts.append([found.speculation.proposed, found.speculation.accepted])
    assert counts[0] == counts[1] == counts[2]


def test_a_model_without_a_head_is_refused(tiny):
    wanted = r"the model has no multi-token-prediction head: load it with mtp=True"
    for call in (
        lambda: mpjax.generate(tiny, "x", speculate="mtp"),
        lambda: mpjax.Engine(tiny, speculate=mpjax.MTP()),
        lambda: generate_tokens(
            hybrid_model(), jnp.ones((1, 4), jnp.int32), [4], max_new_tokens=2, speculate="mtp"
        ),
    ):
        with pytest.raises(ValueError, match=wanted):
            call()
    with pytest.raises(ValueError, match="MTP: k is 0: expected a whole number from 1 to 32"):
        mpjax.MTP(0)
