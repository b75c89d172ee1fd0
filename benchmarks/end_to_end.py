"""Qwen3-8B's shapes with random weights, from an AWQ checkpoint on disk to decoded tokens."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from benchmarks import measure, random_checkpoint
from models import Decoder
from models.presets import QWEN3_8B
from mpjax.decoding import DecodingState, Limits, decode, jit_decode, jit_prefill
from mpjax.sampling import Sampling, row_keys
from pallas_kernels import PagedKVCache


def main() -> None:
    """Writes the checkpoint, loads it, generates, and saves `end_to_end-PRECISION-bBATCH.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="W4A16KV8")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens to decode")
    parser.add_argument("--layers", type=int, default=QWEN3_8B.num_layers)
    parser.add_argument("--output", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    config = dataclasses.replace(QWEN3_8B, windows=(None,) * arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        print("writing a random checkpoint ...", flush=True)
        random_checkpoint.write_awq(Path(folder), config)
        begin = time.perf_counter()
        lm = mpjax.load(folder, precision=arguments.precision)
        jax.block_until_ready(lm.model)
        load_seconds = time.perf_counter() - begin
        print(f"loaded in {load_seconds:.1f} s", flush=True)
    result = _generate(lm, arguments.batch, arguments.prompt, arguments.new)
    result |= {"load_seconds": load_seconds, "precision": arguments.precision}
    name = f"end_to_end-{arguments.precision}-b{arguments.batch}"
    print(measure.save(name, result, arguments.output).read_text())


def _generate(lm: mpjax.LanguageModel, batch: int, prompt: int, new: int) -> dict[str, object]:
    vocabulary = lm.config.vocab_size
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, vocabulary, (batch, prompt)), jnp.int32
    )
    lengths = jnp.full(batch, prompt, jnp.int32)
    keys, sampling = row_keys(range(batch)), Sampling()
    # No stop token: random weights must not end a row early.
    limits = Limits(
        jnp.zeros(0, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.full(batch, new, jnp.int32)
    )

    def prefill() -> tuple[DecodingState, float]:
        cache = jax.block_until_ready(lm.model.create_cache(batch, prompt + new, lm.kv_format))
        begin = time.perf_counter()
        state = jit_prefill(lm.model, tokens, lengths, cache, keys, sampling, limits, room=new)
        state.tokens.block_until_ready()
        return state, time.perf_counter() - begin

    _, first_prefill = prefill()
    prefill_seconds = [prefill()[1] for _ in range(5)]

    decode_seconds = []
    for _ in range(4):
        state, _ = prefill()
        begin = time.perf_counter()
        state = jit_decode(lm.model, state, sampling, limits, jnp.int32(new))
        state.tokens.block_until_ready()
        decode_seconds.append(time.perf_counter() - begin)
    print(f"prefill {prefill_seconds}, decode {decode_seconds}", flush=True)
    peak_bytes = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    seconds_per_step = statistics.median(decode_seconds[1:]) / (new - 1)

    # The kernels of a few steps, undonated, so that the same state can be run again: the copy of
    # the cache that this costs is left out.
    steps = 8
    state, _ = prefill()
    undonated = jax.jit(decode)
    arguments = (lm.model, state, sampling, limits, jnp.int32(1 + steps))
    kernels = measure.kernel_microseconds(undonated, *arguments, iterations=3)
    kernels = {name: time / steps for name, time in kernels.items() if "memcpy" not in name.lower()}
    prefill_kernels = measure.kernel_microseconds(
        jax.jit(_read_prompt), lm.model, tokens, lengths, state.cache, iterations=3
    )
    cache_bytes = state.cache.nbytes * (prompt + new / 2) / state.cache.capacity
    embedding = lm.model.embedding.get_value().nbytes  # a few rows are read, not all
    step_bytes = lm.nbytes - embedding + cache_bytes
    bandwidth = measure.read_bandwidth()
    return {
        "batch": batch,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "prefill_seconds_with_compilation": first_prefill,
        "time_to_first_token_seconds": statistics.median(prefill_seconds),
        "decode_tokens_per_second": batch / seconds_per_step,
        "decode_step_microseconds": seconds_per_step * 1e6,
        "sum_of_kernels_microseconds": sum(kernels.values()),
        "roofline_microseconds": step_bytes / bandwidth * 1e6,
        "read_bandwidth_bytes_per_second": bandwidth,
        "weights_bytes": lm.nbytes,
        "cache_bytes": state.cache.nbytes,
        "peak_bytes": peak_bytes,
        "kernel_microseconds_per_step": dict(sorted(kernels.items(), key=lambda item: -item[1])),
        "prefill_kernel_microseconds": dict(
            sorted(prefill_kernels.items(), key=lambda item: -item[1])
        ),
    }


def _read_prompt(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, cache: PagedKVCache
) -> jax.Array:
    cache = dataclasses.replace(cache, lengths=jnp.zeros_like(cache.lengths))
    return model.step(tokens, lengths, cache, fresh=True)[0]


if __name__ == "__main__":
    main()
