"""GRPO on the bundled model, which learns to assign long numbers from a computed reward.

    python examples/grpo.py                               # adapters over packed weights
    python examples/grpo.py --train full                  # all weights in float32, packed sampler
    python examples/grpo.py --train full --precision W16A32KV16

The sampler is an engine, whose weights are replaced in place by the trainer's after each step.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax

PROMPTS = ["total = ", "count = ", "self.size = ", "    limit = "]
GROUP, NEW, LENGTH, BATCH = 8, 8, 16, 32  # completions per prompt, their tokens, with prompt
RATES = {"lora": 2e-3, "full": 1e-4}


def reward(text: str) -> float:
    """A quarter for each digit of a line that is a non-negative integer, at most 1; else 0."""
    try:
        value = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError, MemoryError):
        return 0.0
    return min(len(str(value)), 4) / 4 if type(value) is int and value >= 0 else 0.0


@dataclasses.dataclass
class Batch:
    """Prompts with completions, padded to [BATCH, LENGTH], and the sampler's log-probabilities.

    is_new: whether a token was sampled, bool [BATCH, LENGTH − 1]. advantages: float32 [BATCH].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sampled: np.ndarray
    is_new: np.ndarray
    advantages: np.ndarray


def sample(engine: mpjax.Engine, seed: int) -> tuple[Batch, float]:
    """Samples a group of completions for each prompt; returns the batch and the mean reward."""
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    found = [
        engine.submit(
            prompt,
            max_new_tokens=NEW,
            sampling={"temperature": 1.0},
            stop="\n",
            seed=seed * BATCH + number,
        )
        for number, prompt in enumerate(prompts)
    ]
    handles = [handle.result() for handle in found]
    rewards = np.array([reward(handle.text) for handle in handles]).reshape(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdims=True)
    advantages = (centred / (rewards.std(1, keepdims=True) + 1e-3)).reshape(-1)
    tokens = np.zeros((BATCH, LENGTH), np.int32)
    lengths, sampled = np.zeros(BATCH, np.int32), np.zeros((BATCH, LENGTH - 1), np.float32)
    is_new = np.zeros((BATCH, LENGTH - 1), bool)
    for row, handle in enumerate(handles):
        first, ids = len(handle.prompt), [*handle.prompt, *handle.tokens]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        sampled[row, first - 1 : len(ids) - 1] = handle.logprobs
        is_new[row, first - 1 : len(ids) - 1] = True
    batch = Batch(tokens, lengths, sampled, is_new, advantages.astype(np.float32))
    return batch, float(rewards.mean())


def adam(gradients: Any, moments: Any, step: jax.Array, rate: float) -> tuple[Any, Any]:
    """Adam's changes of the weights, and its next moments."""
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradients)

    def change(m: jax.Array, s: jax.Array) -> jax.Array:
        return -rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(change, first, second), (first, second)


def train(kind: str, precision: str, steps: int) -> tuple[list[float], mpjax.Mismatch]:
    """Trains; returns each step's mean reward, and the final mismatch of sampler and trainer.

    kind: `lora` or `full`. precision: of the sampler.
    """
    filter_: Any = nnx.LoRAParam if kind == "lora" else mpjax.trainable
    lm = mpjax.load(mpjax.bundled_model(), precision=precision, dtype="float32", progress=False)
    if kind == "lora":
        lm = mpjax.lora(lm, 8)
        trainer = lm.for_device
    else:
        plain = mpjax.load(mpjax.bundled_model(), dtype="float32", progress=False)
        trainer = plain.model
    structure, weights, frozen = nnx.split(trainer, filter_, ...)  # type: ignore[misc]

    def logprobs(weights: Any, batch: dict[str, Any]) -> jax.Array:
        model = nnx.merge(structure, weights, frozen)
        return mpjax.token_logprobs(model, batch["tokens"], batch["lengths"])

    def loss(weights: Any, batch: dict[str, Any]) -> jax.Array:
        found = logprobs(weights, batch)
        ratio = mpjax.importance_weights(batch["sampled"], found)
        gain = jnp.where(batch["is_new"], ratio * found, 0.0) * batch["advantages"][:, None]
        return -gain.sum() / batch["is_new"].sum(dtype=jnp.float32)

    @jax.jit
    def update(weights: Any, moments: Any, step: jax.Array, batch: dict[str, Any]) -> Any:
        changes, moments = adam(jax.grad(loss)(weights, batch), moments, step, RATES[kind])
        return jax.tree.map(jnp.add, weights, changes), moments

    zeros = jax.tree.map(jnp.zeros_like, weights)
    moments, rewards, batch = (zeros, zeros), [], None
    with mpjax.Engine(lm, slots=BATCH, max_tokens=64, chunk_tokens=256) as engine:
        for step in range(steps):
            batch, mean = sample(engine, step)
            rewards.append(mean)
            print(f"step {step:3}: mean reward {mean:.3f}, weights {lm.version}", flush=True)
            arrays = dataclasses.asdict(batch)
            before = weights
            weights, moments = update(weights, moments, jnp.float32(step + 1), arrays)
            engine.update_weights(weights)
    assert batch is not None
    difference = mpjax.mismatch(batch.sampled, jax.jit(logprobs)(before, arrays), batch.is_new)
    print(f"sampler and trainer: {difference}")
    return rewards, difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", choices=list(RATES), default="lora")
    parser.add_argument("--precision", default="W4A32KV16")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    train(given.train, given.precision, given.steps)
