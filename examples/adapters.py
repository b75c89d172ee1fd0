"""Low-rank adapters on a model whose weights stay packed in 4 bits (QLoRA): trained and served."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from mpjax.models import Decoder

RANK, STEPS, BATCH, LENGTH, RATE = 8, 24, 4, 128, 0.1

lm = mpjax.load(mpjax.bundled_model(), precision="W4A16KV16", progress=False)
tuned = mpjax.lora(lm, RANK, ["o_proj", "down_proj"])
# The pairs of matrices are the only variables with gradients.
structure, adapters, frozen = nnx.split(tuned.model, nnx.LoRAParam, ...)  # type: ignore[misc]

# A text unlike the Python source on which the model was trained.
text = "\n".join(f"The {n}th line says that {n} plus {n} is {2 * n}." for n in range(400))
assert lm.tokenizer is not None
ids = lm.tokenizer.encode(text)
tokens = jnp.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)


def loss(adapters: nnx.State, frozen: nnx.State, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats, of each token given the tokens before it."""
    model: Decoder = nnx.merge(structure, adapters, frozen)
    logprobs = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def step(adapters: nnx.State, frozen: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
    """Makes a step of gradient descent; returns the new adapters and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(adapters, frozen, tokens)
    return jax.tree.map(lambda weight, g: weight - RATE * g, adapters, gradient), value


for count in range(STEPS):
    first = count * BATCH % (len(tokens) - BATCH)
    adapters, value = step(adapters, frozen, tokens[first : first + BATCH])
    if count % 4 == 0 or count == STEPS - 1:
        print(f"step {count:2}: loss {value:.3f}")

# The base serves the adapter beside rows without; `mpjax.save_adapter(tuned, folder)` writes it.
nnx.update(tuned.model, adapters)
lm.add_adapter("lines", mpjax.Adapter.of(tuned.model))
made = mpjax.generate(lm, ["The 401th line"] * 2, max_new_tokens=12, adapter=["lines", None])
print(f"with the adapter: {made.text[0]!r}, without: {made.text[1]!r}")
