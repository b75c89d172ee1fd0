"""A GRPO loop with mpjax's engine, and the same loop with a sampler of plain JAX.

python -m benchmarks.grpo --layers 8

Both loops train a 16-bit model of Qwen3-8B's shapes with the update of examples/grpo.py. One
samples from a packed engine, which gets the new weights after each step (`update_weights`). The
other samples from the trainer's arrays with a program like those of Flax's and Tunix's examples:
16-bit products and a dense 16-bit cache, all rows in one `while_loop` until the longest has ended.
Completions have random lengths. Printed are new tokens per second of whole loops and of sampling.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from benchmarks.rollouts import SMALL
from examples.grpo import adam
from mpjax.bench import measure
from mpjax.bench.random_model import random_model
from mpjax.models import Decoder, Qwen3, rotary
from mpjax.models.presets import QWEN3_8B
from mpjax.models.state import WHOLE
from mpjax.precision import Precision

Cache = tuple[jax.Array, jax.Array]  # keys and values [layers, rows, tokens, heads, channels]
WARM, ROUNDS = 2, 2  # rounds that compile, and that are measured


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, begin: jax.Array) -> jax.Array:
    """Attention of [rows, tokens, heads, channels] from position `begin` to a dense cache."""
    rows, tokens, heads, dim = query.shape
    grouped = query.reshape(rows, tokens, keys.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys).astype(jnp.float32) * dim**-0.5
    seen = jnp.arange(keys.shape[1])[None] <= begin + jnp.arange(tokens)[:, None]
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -1e30), -1)
    found = jnp.einsum("bkgts,bskd->btkgd", weights.astype(values.dtype), values)
    return found.reshape(rows, tokens, heads * dim)


def _step(
    model: Decoder, tokens: jax.Array, begin: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Logits [rows, vocabulary] after tokens [rows, tokens], which are added to the cache."""
    config, (all_keys, all_values), table = model.config, cache, cast(Any, model.embedding)
    positions = jnp.broadcast_to(begin + jnp.arange(tokens.shape[1]), tokens.shape)
    angles = positions[..., None].astype(jnp.float32) * rotary.frequencies(config)[None, None]
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    x = table.get_value()[tokens]
    for number, layer in enumerate(model.layers):
        own = layer.attention
        parts = own.qkv(layer.attention_norm(x), WHOLE)
        query, key, value = (each.reshape(*tokens.shape, -1, own.head_dim) for each in parts)
        query = rotary.rotate(own.query_norm(query), cosines, sines)
        key = rotary.rotate(own.key_norm(key), cosines, sines)
        place = (number, 0, begin, 0, 0)
        all_keys = jax.lax.dynamic_update_slice(all_keys, key[None], place)
        all_values = jax.lax.dynamic_update_slice(all_values, value[None], place)
        x = x + own.output(_attend(query, all_keys[number], all_values[number], begin), WHOLE)
        x = x + layer.mlp(layer.mlp_norm(x), WHOLE)
    return model.logits(x[:, -1]), (all_keys, all_values)


@functools.partial(jax.jit, static_argnums=4)
def plainly(
    model: Decoder, prompts: jax.Array, lengths: jax.Array, key: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """New tokens int32 [rows, most], sampled at temperature 1, and their log-probabilities.

    prompts: int32 [rows, tokens]. lengths: int32 [rows], the new tokens of each row.
    """
    config, (rows, first) = model.config, prompts.shape
    heads, dim = model.layers[0].attention.heads[1], model.layers[0].attention.head_dim
    empty = jnp.zeros((len(model.layers), rows, first + most, heads, dim), config.dtype)

    def drawn(logits: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jax.random.categorical(jax.random.fold_in(key, number), logits).astype(jnp.int32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
        return token, chosen

    def body(carry: Any) -> Any:
        number, tokens, logprobs, logits, cache = carry
        token, logprob = drawn(logits, number)
        tokens, logprobs = tokens.at[:, number].set(token), logprobs.at[:, number].set(logprob)
        logits, cache = _step(model, token[:, None], first + number, cache)
        return number + 1, tokens, logprobs, logits, cache

    logits, cache = _step(model, prompts, jnp.int32(0), (empty, empty))
    tokens, logprobs = jnp.zeros((rows, most), jnp.int32), jnp.zeros((rows, most))
    begin = jnp.int32(0), tokens, logprobs, logits, cache
    _, tokens, logprobs, *_ = jax.lax.while_loop(lambda it: it[0] < lengths.max(), body, begin)
    return tokens, logprobs


def by_engine(
    engine: mpjax.Engine, prompts: np.ndarray, lengths: np.ndarray, seed: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The result of `plainly` from an engine."""
    handles = [
        engine.submit(
            prompt.tolist(),
            max_new_tokens=int(length),
            sampling={"temperature": 1.0, "stop_ids": ()},
            seed=seed * len(prompts) + row,
        )
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    tokens = np.zeros((len(prompts), most), np.int32)
    logprobs = np.zeros((len(prompts), most), np.float32)
    for row, handle in enumerate(handles):
        handle.result()
        tokens[row, : lengths[row]], logprobs[row, : lengths[row]] = handle.tokens, handle.logprobs
    return tokens, logprobs


def make_update(structure: Any) -> Callable[..., Any]:
    """A training step: (weights, moments, number, batch) → weights and moments, donated."""

    def loss(weights: Any, batch: dict[str, jax.Array]) -> jax.Array:
        found = mpjax.token_logprobs(
            nnx.merge(structure, weights), batch["tokens"], batch["lengths"]
        )
        ratio = mpjax.importance_weights(batch["sampled"], found)
        gain = jnp.where(batch["is_new"], ratio * found, 0.0) * batch["advantages"][:, None]
        return -gain.sum() / batch["is_new"].sum(dtype=jnp.float32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, moments: Any, step: jax.Array, batch: Any) -> Any:
        changes, moments = adam(jax.grad(loss)(weights, batch), moments, step, 1e-6)
        changes, *moments = (
            jax.tree.map(lambda x, weight: x.astype(weight.dtype), tree, weights)
            for tree in (changes, *moments)
        )
        return jax.tree.map(jnp.add, weights, changes), tuple(moments)

    return update


def loop(options: argparse.Namespace, config: Any, engine: mpjax.Engine | None) -> dict[str, float]:
    """Tokens per second of whole loops, and of sampling alone."""
    rng = np.random.default_rng(0)
    rows, first, most = options.prompts * options.group, options.prompt, options.new
    structure, weights = nnx.split(random_model(Qwen3, config, None))
    update, zeros = make_update(structure), jax.tree.map(jnp.zeros_like, weights)
    moments = zeros, jax.tree.map(jnp.copy, zeros)
    times = []
    for number in range(WARM + ROUNDS):
        own = rng.integers(1, config.vocab_size, (options.prompts, first)).astype(np.int32)
        prompts = np.repeat(own, options.group, 0)
        lengths = rng.integers(most // 8, most + 1, rows).astype(np.int32)
        begin = time.perf_counter()
        if engine is None:
            model = nnx.merge(structure, weights)
            found = plainly(model, prompts, lengths, jax.random.key(number), most)
        else:
            found = by_engine(engine, prompts, lengths, number, most)
        tokens, logprobs = map(np.asarray, found)
        sampled = time.perf_counter()
        columns = np.arange(first + most - 1)[None]
        is_new = (columns >= first - 1) & (columns < first - 1 + lengths[:, None])
        batch = {
            "tokens": np.concatenate([prompts, tokens], 1),
            "lengths": first + lengths,
            "sampled": np.pad(logprobs, ((0, 0), (first - 1, 0))),
            "is_new": is_new,
            "advantages": rng.standard_normal(rows).astype(np.float32),
        }
        weights, moments = update(weights, moments, jnp.float32(number + 1), batch)
        jax.block_until_ready(weights)
        trained = time.perf_counter()
        if engine is not None:
            engine.update_weights(weights)
            jax.block_until_ready(jax.tree.leaves(nnx.state(engine.lm.model)))
        ended = time.perf_counter()
        times.append((sampled - begin, trained - sampled, ended - trained, lengths.sum()))
        print(f"round {number}: {[round(float(each), 2) for each in times[-1]]}", flush=True)
    sampling, training, updating, count = np.sum(times[WARM:], 0)
    return {
        "new_tokens": int(count),
        "sampling_seconds": sampling,
        "training_seconds": training,
        "update_seconds": updating,
        "sampling_tokens_per_second": count / sampling,
        "loop_tokens_per_second": count / (sampling + training + updating),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=8, help="by default %(default)s of 36")
    parser.add_argument("--precision", default="W4A16KV16", help="by default %(default)s")
    parser.add_argument("--prompts", type=int, default=4, help="by default %(default)s")
    parser.add_argument("--group", type=int, default=8, help="completions of each")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="most new tokens of a completion")
    parser.add_argument("--small", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="writes grpo.json")
    options = parser.parse_args(arguments)
    precision, config = Precision.of(options.precision), SMALL if options.small else QWEN3_8B
    config = dataclasses.replace(config, layers=config.layers[: options.layers], stop_ids=())
    found: dict[str, Any] = {"plain": loop(options, config, None)}
    packed = random_model(Qwen3, config, precision.weights)
    lm = mpjax.LanguageModel(packed, None, precision.kv, Path())
    rows, most = options.prompts * options.group, options.prompt + options.new
    with mpjax.Engine(lm, slots=rows, max_tokens=most, cache_memory=0.1) as engine:
        found["mpjax"] = loop(options, config, engine)
    for name in ("sampling", "loop"):
        own, plain = (found[each][f"{name}_tokens_per_second"] for each in ("mpjax", "plain"))
        print(f"{name}: {own:.0f} tokens/s, plainly {plain:.0f}: {own / plain:.2f} ×")
    print(json.dumps(found))
    if options.save:
        given = {name: value for name, value in vars(options).items() if name != "save"}
        measure.save("grpo", {"options": given, "results": found}, options.save)


if __name__ == "__main__":
    main()
