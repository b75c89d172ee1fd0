"""Tunix samples with a packed model, and trains on its samples. Needs google-tunix."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix")

import optax
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import mpjax
from mpjax.trainers.tunix import TunixRollout, _completion_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Tunix
CONFIG = RolloutConfig(
    max_tokens_to_generate=8,
    max_prompt_length=12,
    temperature=1.0,
    return_logprobs=True,
    eos_tokens=[0],
)


class Tokenizer:
    """The tokenizer of the bundled model, with the methods that Tunix asks for."""

    def __init__(self, tokenizer: Any):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def bos_id(self) -> int:
        return 0

    pad_id = eos_id = bos_id


@pytest.fixture(autouse=True)
def _promotions_of_tunix():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


@pytest.fixture
def actor(mesh):
    config = llama3.ModelConfig(
        num_layers=5,
        vocab_size=2048,
        embed_dim=256,
        hidden_dim=768,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    folder = str(mpjax.bundled_model())
    return params.create_model_from_safe_tensors(folder, config, mesh, dtype=jnp.float32)


@pytest.fixture
def load(tmp_path):
    """`load(precision)`: the bundled model, with the rotary base of all of Tunix's Llama models."""
    folder = shutil.copytree(mpjax.bundled_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    return functools.partial(mpjax.load, folder, dtype="float32", progress=False)


def actor_logprobs(actor, found, completions):
    graph, state = nnx.split(actor)
    prompts = jnp.asarray(found.left_padded_prompt_tokens)
    return common.compute_per_token_logps(graph, state, prompts, completions, 0, 0)


def test_the_actors_weights_and_logprobs(actor, mesh, load):
    """The engine has the actor's weights, and log-probabilities are those of the actor."""
    lm = load(precision="W32A32KV16")
    tokenizer = TokenizerAdapter(Tokenizer(lm.tokenizer))
    rollout = TunixRollout(
        rollout_actor=actor, tokenizer=tokenizer, rollout_config=CONFIG, lm=lm, mesh=mesh
    )
    assert lm.version == 1
    for seed in (3, jax.random.key(3), jax.random.PRNGKey(3)):  # an integer and both kinds of keys
        keys = jax.random.key_data(jax.random.split(jax.random.key(3)))
        own = rollout._seeds(seed, 2)
        is_typed = jnp.issubdtype(own.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(jax.random.key_data(own) if is_typed else own, keys)
    found = rollout.generate(["def f(", "import os\nimport sys\n"], CONFIG)
    assert [len(row) for row in found.tokens] == [8, 8]
    assert found.left_padded_prompt_tokens.shape == (2, 12)
    assert found.text == [tokenizer.decode(row.tolist()) for row in found.tokens]
    completions = jnp.asarray(np.stack(found.tokens))
    expected = actor_logprobs(actor, found, completions)
    np.testing.assert_allclose(np.stack(found.logprobs), expected, atol=1e-4)
    program: Any = _completion_logprobs
    compiled = program._cache_size()
    seeded = dataclasses.replace(CONFIG, seed=3)
    longest = rollout.generate(["def f(", "x"], seeded)
    ended = dataclasses.replace(seeded, eos_tokens=[int(row[2]) for row in longest.tokens])
    assert max(map(len, rollout.generate(["def f(", "x"], ended).tokens)) <= 3
    assert program._cache_size() == compiled
    prompts = jnp.asarray(found.left_padded_prompt_tokens)
    np.testing.assert_allclose(
        rollout.get_per_token_logps(prompts, completions), expected, atol=1e-4
    )
    actor.final_norm.w.set_value(actor.final_norm.w.get_value() * 2)
    rollout.update_params(actor)
    assert lm.version == 2
    np.testing.assert_allclose(
        rollout.get_per_token_logps(prompts, completions),
        actor_logprobs(actor, found, completions),
        atol=1e-4,
    )
    with pytest.raises(ValueError, match="a packed model takes all weights"):
        rollout.update_params(actor, (nnx.LoRAParam,))


def test_grpo(actor, mesh, load):
    """Two steps of Tunix's own GRPO change the actor, and the packed sampler follows."""
    lm = load(precision="W4A32KV16")
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=Tokenizer(lm.tokenizer),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=functools.partial(TunixRollout, lm=lm),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-4), eval_every_n_steps=100, max_steps=2
            ),
            rollout_config=CONFIG,
        ),
    )
    rewards: list[float] = []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        rewards.extend(sum(one.isdigit() for one in text) / 8 for text in completions)
        return rewards[-len(completions) :]

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.0), reward)
    before = np.asarray(actor.layers[0].mlp.down_proj.kernel.get_value())
    learner.train([{"prompts": np.array(["total = ", "count = "])}] * 2)
    assert len(rewards) == 16
    assert lm.version == 3
    assert np.abs(before - np.asarray(actor.layers[0].mlp.down_proj.kernel.get_value())).max() > 0
