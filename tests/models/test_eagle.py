"""The layer of an EAGLE-3 head against float64 numpy, however its tokens come."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models import ConfigError
from mpjax.models.eagle import with_eagle
from mpjax.models.vocabulary import NEVER
from tests.models.small import CONFIG, eagle_model, logits_of, small_config
from tests.models.test_mtp import DRAFTS, TOKENS, propose, ragged_cache


def rotated(heads, position, theta):
    """Heads [heads, channels] whose pairs, half a head apart, turn with the position."""
    half = heads.shape[1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        1,
    )


class Oracle:
    """The head of one sequence by the published formulas, with the keys and values so far."""

    def __init__(self, model) -> None:
        self.spec, self.config = model.config.layers[-1].attention, model.config
        self.layer = jax.tree.map(lambda x: np.asarray(x, np.float64), model.layers[-1])
        self.table = np.asarray(model.embedding.get_value(), np.float64)
        self.ids = np.asarray(model.layers[-1].attention.tokens.get_value())
        # Before the first token there is no pair.
        nothing = np.zeros(self.spec.attention.sizes(self.config)[1:])
        self.keys, self.values = [nothing], [nothing]

    def norm(self, x, module):
        root = np.sqrt((x**2).mean(-1, keepdims=True) + self.spec.norm_eps)
        return x / root * module.weight.get_value()

    def fuse(self, streams):
        """The hidden state of a token from the streams that enter the layers."""
        mixer = self.layer.attention
        joined = np.concatenate(streams)
        joined = joined if mixer.fc_norm is None else self.norm(joined, mixer.fc_norm)
        return joined @ mixer.fc.kernel.get_value()

    def add(self, hidden, token):
        """The logits after a pair, and the hidden state of the next one."""
        mixer, spec, position = self.layer.attention, self.spec.attention, len(self.keys)
        normed = self.norm(hidden, mixer.hidden_norm)
        x = np.concatenate([self.norm(self.table[token], mixer.embedding_norm), normed])
        heads, kv_heads, dim = spec.sizes(self.config)
        kernels = [part.kernel.get_value() for part in mixer.attention.qkv.parts]
        joint = x @ np.concatenate(kernels, 1)
        query, key, value = np.split(joint, [heads * dim, (heads + kv_heads) * dim])
        query = rotated(query.reshape(heads, dim), position, spec.theta)
        self.keys.append(rotated(key.reshape(kv_heads, dim), position, spec.theta))
        self.values.append(value.reshape(kv_heads, dim))
        keys, values = (np.repeat(np.stack(x), heads // kv_heads, 1) for x in self.entries)
        scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(dim)
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        attended = np.einsum("ht,thd->hd", chances, values).reshape(-1)
        stream = normed if self.spec.norm_before_residual else hidden
        stream = stream + attended @ mixer.attention.output.kernel.get_value()
        kernels = [part.kernel.get_value() for part in self.layer.mlp.gate_up.parts]
        joint = self.norm(stream, self.layer.mlp_norm) @ np.concatenate(kernels, 1)
        gate, up = np.split(joint, 2)
        stream = stream + (gate / (1 + np.exp(-gate)) * up) @ self.layer.mlp.down.kernel.get_value()
        found = self.norm(stream, mixer.norm)
        logits = np.full(self.config.vocab_size, NEVER)
        logits[self.ids] = found @ mixer.head.kernel.get_value()
        return logits, found if self.spec.norm_output else stream

    @property
    def entries(self):
        return self.keys, self.values


VARIANTS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


@pytest.mark.parametrize("fields", [{}, VARIANTS])
def test_logits_of_proposals(fields):
    """Behind padded prompts in pieces, after rejected tokens, and behind varlen tokens."""
    model = eagle_model(fields=fields)
    whole = jax.jit(lambda model, x: model.inspect(x, capture={"residual": [1, 2, 3]})[1])
    seen = [np.asarray(x, np.float64)[0] for x in whole(model, TOKENS[None])["residual"].values()]
    cache, lengths = ragged_cache(model)
    expected = []
    for length in lengths:
        oracle = Oracle(model)
        hidden = [oracle.fuse([stream[at] for stream in seen]) for at in range(length)]
        for position in range(1, length):
            oracle.add(hidden[position - 1], TOKENS[position])
        logits, state = oracle.add(hidden[length - 1], TOKENS[length])
        expected.append([logits])
        for token in DRAFTS:
            logits, state = oracle.add(state, token)
            expected[-1].append(logits)
    drafts, ids = np.array([DRAFTS, DRAFTS]), oracle.ids
    for _ in range(2):  # proposing again changes nothing
        found, cache = propose(model, TOKENS[lengths], drafts, cache)
        own = np.asarray(expected)[..., ids]
        np.testing.assert_allclose(found[..., ids], own, rtol=0, atol=3e-4 * np.abs(own).max())
        np.testing.assert_allclose(np.delete(found, ids, -1), NEVER)


def test_the_models_own_logits_are_those_without_a_head():
    model, tokens = eagle_model(), jnp.asarray(TOKENS[None])
    found = logits_of(model, tokens)
    bare = model.without_drafts()
    assert bare.config.num_layers == bare.config.depth == model.config.depth == 3
    np.testing.assert_array_equal(found, logits_of(bare, tokens))
    cache = [one.create_cache(1, 32, "KV16", 16) for one in (model, bare)]
    step = jax.jit(lambda model, cache: model.step(tokens, np.array([30]), cache)[0])
    np.testing.assert_array_equal(step(model, cache[0]), step(bare, cache[1]))


@pytest.mark.parametrize(
    ("changes", "taps", "message"),
    [
        ({"hidden_size": 32}, (0, 1), "hidden_size is 32: expected 64"),
        ({"vocab_size": 49}, (0, 1), "vocab_size is 49: expected 50"),
        ({}, (1, 1), r"reads are \[1, 1\]: expected rising numbers from 0 to 2"),
        ({}, (1, 3), r"reads are \[1, 3\]: expected rising numbers from 0 to 2"),
        ({"qkv_bias": True}, (0, 1), "attention_bias, mlp_bias or a sliding window is set"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes, taps, message):
    head = small_config((None,), **changes)
    with pytest.raises(ConfigError, match=message):
        with_eagle(CONFIG, head, taps, vocabulary=10)
    headed = with_eagle(CONFIG, small_config((None,)), (0, 1), vocabulary=10)
    with pytest.raises(ConfigError, match="the model has a head already"):
        with_eagle(headed, small_config((None,)), (0, 1), vocabulary=10)
    assert dataclasses.replace(headed, layers=headed.layers[:-1]) == CONFIG
