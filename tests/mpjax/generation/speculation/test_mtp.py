"""A head of the model proposes, MTP or EAGLE-3; what is generated stays the model's."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.models.parameters import find
from tests.models.small import eagle_model, hybrid_model, logits_of, mtp_model
from tests.mpjax.generation.speculation.test_draft import HOT, PROMPT, ROWS, WORDS, surprise
from tests.mpjax.generation.speculation.test_states import NEW, prompts
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


def eagle(seed=0, share=0.3, **changes):
    """A model with an EAGLE-3 head that sees little but the newest token, as in `agreeing`.

    Attention finds the newest token's own pair, whose value is the token's embedding.
    """
    model = eagle_model(seed, **changes)
    config, layer = model.config, model.layers[-1]
    mixer, size = layer.attention, config.hidden_size
    for place in model.linear_places(config):
        if place.path.endswith(("attention.output", "mlp.down")):
            kernel = find(model, place.path).kernel
            kernel.set_value(share * kernel.get_value())
    heads, kv_heads, dim = config.layers[-1].attention.attention.sizes(config)
    rng, copies = np.random.default_rng(0), heads // kv_heads
    keys = rng.standard_normal((size, kv_heads, dim)) * dim**-0.5
    queries = np.repeat(keys, copies, 1)
    values = np.eye(size, kv_heads * dim)
    both = np.concatenate([x.reshape(size, -1) for x in (queries, keys, values)], 1)
    both = np.concatenate([both, 0.02 * rng.standard_normal(both.shape)])
    out = np.repeat(np.eye(kv_heads * dim, size).reshape(kv_heads, 1, dim, -1), copies, 1) / copies
    for linear, kernel in (
        (mixer.attention.qkv.parts[0], both),
        (mixer.attention.output, out.reshape(-1, size)),
        (mixer.fc, 0.1 * np.asarray(mixer.fc.kernel.get_value())),
        (mixer.head, np.asarray(model.head.get_value())[np.asarray(mixer.tokens.get_value())].T),
    ):
        linear.kernel.set_value(jnp.asarray(kernel, jnp.float32))
    mixer.embedding_norm.weight.set_value(jnp.ones(size))
    mixer.norm.weight.set_value(model.norm.weight.get_value())
    return model


@pytest.mark.parametrize(
    ("head", "kv"),
    [
        ("mtp", "KV4c"),
        ("experts", "KV16"),
        ("eagle", "KV4c"),
        in_sweep("mtp", "KV8"),
        in_sweep("experts", "KV8"),
        in_sweep("eagle", "KV8"),
    ],
)
def test_greedy_tokens_are_those_of_plain_decoding(prompts, head, kv):
    """Over the end of a block of 128 tokens, and with rows that are drawn beside them."""
    model, spelled = eagle(), "eagle"
    if head != "eagle":
        model, spelled = agreeing(mtp_model(experts=head == "experts"), 0.3), "mtp"
    if kv == "KV4c":
        tokens, lengths = prompts
        prompts = jnp.concatenate([jnp.tile(tokens[:, :18], (1, 5)), tokens], 1), lengths + 90
    sampling = {"temperature": np.array([0, 0.7, 1.5, 0]), "stop_ids": ()}
    run = functools.partial(
        generate_tokens, model, *prompts, max_new_tokens=NEW, kv_format=kv, sampling=sampling
    )
    plain, found = run(), run(speculate=spelled)
    greedy = np.array([0, 3])
    np.testing.assert_array_equal(found.tokens[greedy], plain.tokens[greedy])
    done = found.speculated
    accepted, proposed = int(done.accepted.sum()), int(done.proposed.sum())
    assert NEW // 3 < accepted < proposed
    np.testing.assert_array_equal(done.steps + done.accepted, NEW - 1)


@pytest.mark.parametrize("speculate", [mpjax.MTP(k=2), mpjax.Eagle(k=2)])
def test_it_runs_under_jit(prompts, speculate):
    model = eagle() if isinstance(speculate, mpjax.Eagle) else agreeing(mtp_model(), 0.3)
    run = functools.partial(generate_tokens, max_new_tokens=8, speculate=speculate)
    found = jax.jit(run)(model, *prompts)
    expected = generate_tokens(model, *prompts, max_new_tokens=8)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert int(found.speculated.accepted.sum()) > 0


@pytest.mark.parametrize("spelled", ["mtp:2", "eagle:2"])
def test_texts_have_the_models_distribution(spelled):
    """Of all texts of three words, also of those that the head can't propose."""
    if spelled == "mtp:2":
        model = agreeing(mtp_model(1, vocab_size=WORDS), 0.7)
    else:
        model = eagle(1, 0.7, tokens=WORDS - 1, vocab_size=WORDS)
    found = generate_tokens(
        model,
        jnp.tile(jnp.array([PROMPT]), (ROWS, 1)),
        jnp.full(ROWS, len(PROMPT)),
        max_new_tokens=3,
        sampling={"temperature": HOT, "stop_ids": ()},
        speculate=spelled,
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
    with pytest.raises(ValueError, match="the model has no EAGLE-3 head: load it with drafter="):
        mpjax.generate(tiny, "x", speculate="eagle:4")
    with pytest.raises(ValueError, match="Eagle: k is 33: expected a whole number from 1 to 32"):
        mpjax.Eagle(33)
    with pytest.raises(ValueError, match="MTP: k is 0: expected a whole number from 1 to 32"):
        mpjax.MTP(0)
