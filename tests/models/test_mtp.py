"""The layer of a multi-token-prediction head against float64 numpy, however its tokens come."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models import ConfigError, Llama
from mpjax.models.mtp import with_mtp
from mpjax.models.qwen_hybrid import Qwen35
from tests.models.small import CONFIG, logits_of, mtp_model

TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 30)
DRAFTS = [7, 3, 11]


def test_without_it_the_model_is_that_of_the_other_layers():
    model = mtp_model()
    scales = np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2, 1)
    model.put_cache_scales(jnp.asarray(np.repeat(scales, model.config.num_kv_heads, 2)))
    bare = model.without_drafts()
    assert bare.config.num_layers == bare.config.depth == len(bare.layers) == 2
    assert (model.config.num_layers, len(model.layers)) == (3, 3)
    np.testing.assert_array_equal(bare.cache_scales.get_value()[..., 0], scales[:2, :, 0])
    np.testing.assert_array_equal(
        logits_of(bare, jnp.asarray(TOKENS)[None]), logits_of(model, jnp.asarray(TOKENS)[None])
    )


class Oracle:
    """The head of one sequence, with the keys and values of the pairs so far."""

    def __init__(self, model) -> None:
        config = self.config = model.config
        self.layer = jax.tree.map(lambda x: np.asarray(x, np.float64), model.layers[-1])
        self.head = np.asarray(model.head.get_value(), np.float64)
        self.table = np.asarray(model.embedding.get_value(), np.float64)
        # Before the first token there is no pair.
        nothing = np.zeros((config.num_kv_heads, config.head_dim))
        self.keys, self.values = [nothing], [nothing]

    def norm(self, x, module):
        root = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / root * module.weight.get_value()

    def turn(self, heads, position):
        half = self.config.rotary_dim // 2
        angles = position * self.config.rope_theta ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half : 2 * half]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = [first * cos - second * sin, second * cos + first * sin, heads[:, 2 * half :]]
        return np.concatenate(turned, 1)

    def add(self, hidden, token):
        """The logits after a pair, and the next hidden state."""
        config, mixer, position = self.config, self.layer.attention, len(self.keys)
        both = self.norm(self.table[token], mixer.embedding_norm)
        both = np.concatenate([both, self.norm(hidden, mixer.hidden_norm)])
        stream = mixer.joint.get_value() @ both
        x, attention = self.norm(stream, self.layer.attention_norm), mixer.attention
        kernels = [part.kernel.get_value() for part in attention.qkv.parts]
        joint = x @ np.concatenate(kernels, 1)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        asked, key, value = np.split(joint, [2 * queries, 2 * queries + keys])
        query, gate = np.split(asked.reshape(config.num_heads, -1), 2, axis=1)
        key, value = (one.reshape(config.num_kv_heads, -1) for one in (key, value))
        query = self.turn(self.norm(query, attention.query_norm), position)
        self.keys.append(self.turn(self.norm(key, attention.key_norm), position))
        self.values.append(value)
        each = config.num_heads // config.num_kv_heads
        keys, values = (np.repeat(np.stack(x), each, axis=1) for x in (self.keys, self.values))
        scores = np.einsum("hd,thd->ht", query, keys) / np.sqrt(config.head_dim)
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        attended = np.einsum("ht,thd->hd", chances, values) / (1 + np.exp(-gate))
        stream = stream + attended.reshape(-1) @ attention.output.kernel.get_value()
        x, mlp = self.norm(stream, self.layer.mlp_norm), self.layer.mlp
        kernels = [part.kernel.get_value() for part in mlp.gate_up.parts]
        gate, up = np.split(x @ np.concatenate(kernels, 1), 2)
        stream = stream + (gate / (1 + np.exp(-gate)) * up) @ mlp.down.kernel.get_value()
        found = self.norm(stream, mixer.norm)
        return self.head @ found, found


@jax.jit
def prefill(model, tokens, counts, cache):
    return model.step(tokens, counts, cache)[1]


@jax.jit
def verify(model, tokens, counts, kept, before):
    """A step of which only some tokens are kept."""
    _, cache = model.step(tokens, counts, before, every_position=True, tentative=True)
    return model.settle(cache, before, kept)


@jax.jit
def varlen(model, tokens, counts, cache):
    return model.step_varlen(tokens, counts, cache)[1]


@jax.jit
def propose(model, newest, drafts, cache):
    """The logits after the newest tokens [batch], and after each of `drafts`, [batch, drafts]."""
    ones = jnp.ones_like(newest)
    logits, hidden, after = model.draft(newest, ones, cache)
    found = [logits]
    for number in range(drafts.shape[1]):
        logits, hidden, after = model.draft(drafts[:, number], ones, after, hidden)
        found.append(logits)
    return jnp.stack(found, 1), model.forget(after, cache)


def ragged_cache(model):
    """A cache of two rows with 29 and 20 of TOKENS, and these numbers.

    Padded prompts come in pieces, then a step whose last tokens are rejected, then varlen tokens.
    """
    lengths = np.array([29, 20])
    cache = model.create_cache(2, 40, "KV16", 16)
    # 13 and 9 tokens, then 12 and none; then 6 of each row, of which 4 and none are kept.
    for counts in ((13, 9), (12, 0)):
        starts, counts = np.asarray(cache.lengths), np.array(counts)
        places = np.minimum(starts[:, None] + np.arange(13), len(TOKENS) - 1)
        cache = prefill(model, TOKENS[places], counts, cache)
    places = np.minimum(np.asarray(cache.lengths)[:, None] + np.arange(6), len(TOKENS) - 1)
    window = np.where(np.arange(6) < 4, TOKENS[places], 1)
    cache = verify(model, window, np.array([6, 6]), np.array([4, 0]), cache)
    # The last 11 tokens of the second row.
    return varlen(model, np.append(TOKENS[9:20], 0), np.array([0, 11]), cache), lengths


def test_logits_of_proposals():
    """After padded prompts in pieces, rejected tokens, and varlen tokens."""
    model = mtp_model()
    hidden = np.asarray(model.hidden(jnp.asarray(TOKENS[None])), np.float64)[0]
    cache, lengths = ragged_cache(model)
    np.testing.assert_array_equal(cache.lengths, lengths)
    drafts = np.array([DRAFTS, DRAFTS])
    expected = []
    for length in lengths:
        oracle = Oracle(model)
        for position in range(1, length):
            oracle.add(hidden[position - 1], TOKENS[position])
        logits, state = oracle.add(hidden[length - 1], TOKENS[length])
        expected.append([logits])
        for token in DRAFTS:
            logits, state = oracle.add(state, token)
            expected[-1].append(logits)
    newest = TOKENS[lengths]
    for _ in range(2):  # proposing again changes nothing
        found, cache = propose(model, newest, drafts, cache)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_a_proposal_leaves_no_trace():
    """Not even behind a full block of a format with blocks, which its first token encodes."""
    model, token = mtp_model(), np.array([7])
    drafts, one = np.array([DRAFTS]), np.ones(1, int)
    whole = np.resize(TOKENS, (1, 128))
    cache = prefill(model, whole, np.array([128]), model.create_cache(1, 256, "KV4c", 128))
    _, after = propose(model, token, drafts, cache)
    found = []
    for begun in (after, cache):
        read = prefill(model, token[:, None], one, begun)
        found.append(propose(model, token, drafts, read)[0])
    np.testing.assert_array_equal(*found)


def test_the_models_own_logits_are_those_without_a_head():
    model, tokens = mtp_model(), jnp.asarray(TOKENS[None])
    found, whole = logits_of(model, tokens), prefill
    cache = whole(model, tokens, np.array([30]), model.create_cache(1, 32, "KV16", 16))
    assert len(cache.layers) == model.config.num_layers == model.config.depth + 1
    model.layers = model.layers[:-1]
    model.config = dataclasses.replace(model.config, layers=model.config.layers[:-1])
    np.testing.assert_array_equal(found, logits_of(model, tokens))


def test_models_without_a_head_are_refused():
    with pytest.raises(ConfigError, match="no MTP head of this family is implemented"):
        with_mtp(CONFIG, Llama.draft_names)
    config = mtp_model().config
    with pytest.raises(ConfigError, match="none of the 1 layers has attention"):
        with_mtp(dataclasses.replace(config, layers=config.layers[:1]), Qwen35.draft_names)
