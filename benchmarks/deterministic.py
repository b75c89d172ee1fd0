"""Deterministic mode by published shapes: whether bits are equal, and its speed.

python -m benchmarks.deterministic --layers 8

Random texts are prefilled in several ways, and each token's log-probability is compared with that
of `token_logprobs`, to the bit: one row alone and all rows together, a token at a time, and in
pieces of uneven sizes. Then a decoding step and a prompt are timed in both modes. It exits with 1
if a bit differs. The head is that of the whole model, so ratios depend on the number of
layers a little.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import measure
from mpjax.bench.random_model import random_model
from mpjax.models import Decoder, Qwen3
from mpjax.models.deterministic import in_own_mode, with_determinism
from mpjax.models.presets import QWEN3_8B, published
from mpjax.models.state import DecoderCache
from mpjax.precision import Precision
from mpjax.sampling.draw import logprobs

ROWS, TOKENS = 64, 161  # 10,240 predicted tokens
PIECES = 37, 1, 64, 1, 37, 20
SMALL = dataclasses.replace(
    QWEN3_8B, vocab_size=2048, hidden_size=256, num_heads=4, num_kv_heads=2, stop_ids=()
)
CONTEXT, STEPS, PROMPT, ROUNDS = 1024, 32, 2048, 4


@functools.partial(jax.jit, donate_argnums=3, static_argnames="format")
@in_own_mode
def _read(
    model: Decoder, tokens: jax.Array, following: jax.Array, cache: DecoderCache, format: str
) -> tuple[jax.Array, DecoderCache]:
    """Adds tokens [rows, tokens] to the cache; returns the log-probabilities of `following`."""
    counts = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    found, cache = model.step(tokens, counts, cache, every_position=True)
    return logprobs(found[..., : model.config.vocab_size], following), cache


def read(model: Decoder, format: str, tokens: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
    """The log-probabilities [rows, tokens − 1] of texts that are prefilled in pieces."""
    cache = model.create_cache(len(tokens), tokens.shape[1], format)
    found, begin = [], 0
    for size in pieces:
        end = begin + size
        one, cache = _read(
            model, tokens[:, begin:end], tokens[:, begin + 1 : end + 1], cache, format
        )
        found.append(one)
        begin = end
    return np.concatenate([np.asarray(one) for one in found], 1)


def differing(model: Decoder, format: str) -> dict[str, int]:
    """Way of prefill → the number of log-probabilities that differ from `token_logprobs`."""
    tokens = np.random.default_rng(0).integers(1, 1000, (ROWS, TOKENS)).astype(np.int32)
    score = jax.jit(mpjax.token_logprobs)
    expected = np.concatenate(
        [np.asarray(score(model, tokens[i : i + 8])) for i in range(0, 64, 8)]
    )
    single, count = (1,) * (TOKENS - 1), TOKENS - 1
    ways: dict[str, tuple[slice, Sequence[int]]] = {
        "64 rows, a token at a time": (slice(None), single),
        "one row, a token at a time": (slice(5, 6), single),
        f"3 rows, pieces of {PIECES}": (slice(9, 12), PIECES),
        "one row, at once": (slice(63, 64), (count,)),
    }

    def count_of(way: tuple[slice, Sequence[int]]) -> int:
        own = read(model, format, tokens[way[0]], way[1])
        return int((own.view(np.uint32) != expected[way[0]].view(np.uint32)).sum())

    with ThreadPoolExecutor() as pool:  # their programs are compiled at the same time
        return dict(zip(ways, pool.map(count_of, ways.values()), strict=True))


def seconds(run: Callable[[], Any]) -> float:
    """The least time of several runs, after one that compiles."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def runs(model: Decoder, format: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Decoding with 1 and 64 rows, and a prompt: a call, and how many steps it has."""

    @functools.partial(jax.jit, static_argnums=1)
    def decode(model: Decoder, batch: int) -> jax.Array:
        cache = model.create_cache(batch, CONTEXT + STEPS, format)
        cache = dataclasses.replace(cache, lengths=jnp.full(batch, CONTEXT, jnp.int32))

        def step(_: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            tokens, cache = carry
            found, cache = model.step(tokens[:, None], jnp.ones_like(tokens), cache)
            return jnp.argmax(found, -1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, STEPS, step, (jnp.ones(batch, jnp.int32), cache))[0]

    @jax.jit
    def prefill(model: Decoder, tokens: jax.Array) -> jax.Array:
        cache = model.create_cache(1, PROMPT, format)
        return model.step(tokens, jnp.array([PROMPT]), cache, fresh=True)[0]

    prompt = jnp.ones((1, PROMPT), jnp.int32)
    return {
        "step of 1 row": (lambda: decode(model, 1), STEPS),
        "step of 64 rows": (lambda: decode(model, 64), STEPS),
        f"prompt of {PROMPT}": (lambda: prefill(model, prompt), 1),
    }


def speeds(models: Sequence[Decoder], format: str) -> list[dict[str, float]]:
    """The milliseconds of each of `runs`, for each model."""
    calls = [runs(model, format) for model in models]
    with ThreadPoolExecutor() as pool:  # compiles
        list(pool.map(lambda call: call[0](), [call for each in calls for call in each.values()]))
    return [
        {name: 1e3 * seconds(call) / steps for name, (call, steps) in each.items()}
        for each in calls
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deterministic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="qwen3-8b", help="by default %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="by default %(default)s")
    parser.add_argument("--precision", default="W4A16KV16", help="by default %(default)s")
    parser.add_argument("--small", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--only", choices=("bits", "speed"), help="by default both")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="writes a JSON file")
    options = parser.parse_args(arguments)
    precision = Precision.of(options.precision)
    family, config = (Qwen3, SMALL) if options.small else published(options.model)
    config = dataclasses.replace(config, layers=config.layers[: options.layers], stop_ids=())
    usual = random_model(family, config, precision.weights)
    model, kv = with_determinism(usual, precision.kv), str(precision.kv)
    result: dict[str, Any] = {
        "model": options.model,
        "layers": options.layers,
        "precision": options.precision,
    }
    if options.only != "speed":
        result["differing"] = differing(model, kv)
        for name, count in result["differing"].items():
            print(f"{name}: {count} tokens differ", flush=True)
    if options.only != "bits":
        own, plain = speeds((model, usual), kv)
        result |= {"milliseconds": own, "usual_milliseconds": plain}
        for name, found in own.items():
            ratio = plain[name] / found
            print(f"{name}: {found:.3f} ms, usually {plain[name]:.3f} ms: {ratio:.2f} of the speed")
    if options.save:
        name = "-".join(filter(None, ("deterministic", options.only)))
        measure.save(name, result, options.save)
    return int(any(result.get("differing", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
