"""Uses a decoder as an ordinary Flax NNX module: initialises, runs, differentiates and steps it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models import DecoderConfig, Qwen3, llama_layers

config = DecoderConfig(
    vocab_size=256,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    # One window for each layer, the number of keys that a query attends to; None: all.
    layers=llama_layers((None, None), intermediate_size=256, qk_norm=True),
    max_position_embeddings=512,
    dtype="float32",
)
model = Qwen3(config, nnx.Rngs(0))
tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size)


def loss(model: Qwen3, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats, of each token given the tokens before it."""
    logprobs = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


value, gradient = jax.jit(jax.value_and_grad(loss))(model, tokens)
print(f"loss {value:.3f}, gradient of the embedding {gradient.embedding[...].shape}")

# The same model with a KV cache, which is an argument and a result; the model holds no state.
step = jax.jit(Qwen3.step, static_argnames="fresh", donate_argnames="cache")
cache = model.create_cache(batch=2, max_tokens=64, format="KV8")
logits, cache = step(model, tokens, jnp.array([16, 9], jnp.int32), cache, fresh=True)
logits, cache = step(model, logits.argmax(-1)[:, None], jnp.ones(2, jnp.int32), cache)
print(f"after two steps the sequences have {cache.lengths.tolist()} tokens")
