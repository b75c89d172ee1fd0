"""Perplexity behind prompts that are read as the cache stores them, and before quantisation.

    python -m benchmarks.prompt_semantics --model FOLDER --windows 8 --formats KV16,KV8,KV4

Windows of 1024 tokens of the bundled model's held-out text: the first half is the prompt, and the
perplexity is that of the second half, which always reads the cache.
"""

from __future__ import annotations

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.evaluation.perplexity import read_held_out
from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache

HALF = 512
PIECE = 128  # the chunk of the second half, in formats without blocks


def nats(model: Decoder, tokens: jax.Array, format: KVFormat, fresh: bool) -> jax.Array:
    """The sum of −ln p of the second half of a window, int32 [1, 2 · HALF].

    format: of the cache. fresh: whether the prompt attends to its unquantised keys and values.
    """
    cache = model.create_cache(1, 2 * HALF, format)
    if fresh:
        half = jnp.full(1, HALF, jnp.int32)
        _, cache = model.step(tokens[:, :HALF], half, cache, fresh=True)
    size = cache.format.block or PIECE
    behind = jnp.pad(tokens, ((0, 0), (0, 1)))[:, 1:]

    def read(
        piece: jax.Array, carry: tuple[DecoderCache, jax.Array]
    ) -> tuple[DecoderCache, jax.Array]:
        cache, total = carry
        own, following = (
            jax.lax.dynamic_slice_in_dim(x, piece * size, size, 1) for x in (tokens, behind)
        )
        counts = jnp.full(1, size, jnp.int32)
        logits, cache = model.step(own, counts, cache, every_position=True)
        logprobs = jax.nn.log_softmax(logits)
        found = jnp.take_along_axis(logprobs, following[..., None], 2)[..., 0]
        place = piece * size + jnp.arange(size)
        counted = (place >= HALF) & (place < 2 * HALF - 1)
        return cache, total - jnp.where(counted, found, 0).sum()

    begin = HALF // size if fresh else 0
    return jax.lax.fori_loop(begin, 2 * HALF // size, read, (cache, jnp.float32(0)))[1]


def main() -> None:
    """Prints a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(mpjax.bundled_model()))
    parser.add_argument("--formats", default="KV16,KV8,KV4,K4cV4c,KVfp8,KV2")
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    lm = mpjax.load(options.model)
    text = "\n\n".join(read_held_out(mpjax.bundled_model() / "held_out.jsonl"))
    ids = np.asarray(lm.require_tokenizer().encode(text), np.int32)[: options.windows * 2 * HALF]
    rows = ids.reshape(options.windows, 1, 2 * HALF)
    run = jax.jit(nats, static_argnames=("format", "fresh"))
    for name in options.formats.split(","):
        perplexities = [
            math.exp(
                sum(
                    float(run(lm.for_device, jnp.asarray(row), KVFormat.parse(name), fresh))
                    for row in rows
                )
                / (len(rows) * (HALF - 1))
            )
            for fresh in (False, True)
        ]
        print(f"{name}: as stored {perplexities[0]:.4f}, before quantising {perplexities[1]:.4f}")


if __name__ == "__main__":
    main()
