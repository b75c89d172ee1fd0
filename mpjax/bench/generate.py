"""Generation with random weights of a published shape, beside what the memory would allow."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from models import Decoder, DecoderConfig, Qwen3
from models.presets import QWEN3_8B
from mpjax.bench import checkpoint, measure
from mpjax.bench.random_model import random_model
from mpjax.decoding import DecodingState, Limits, decode, jit_decode, jit_prefill
from mpjax.precision import Precision
from mpjax.sampling import Sampling, row_keys
from pallas_kernels import PagedKVCache, WeightFormat

# In nats. Different kernels round differently; a model whose cache is wrong is off by several.
GATE = 1.0
ROUNDS = 4  # the first compiles and is not counted
PROFILED_STEPS = 8
AWQ = WeightFormat("uint4", 128)
HEADERS = (
    *("precision", "batch", "load", "first token", "tokens/s", "step"),
    *("sum of its kernels", "memory roofline", "of it", "peak memory"),
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to measure: each batch in each precision.

    from_disk: writes an AWQ checkpoint and loads it, for the time that this takes.

    Raises ValueError for a precision that can't be read or that an AWQ checkpoint does not have,
    for batches below 1, and for more tokens than the model has positions.
    """

    precisions: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    from_disk: bool = False
    config: DecoderConfig = QWEN3_8B

    def __post_init__(self) -> None:
        for text in self.precisions:
            weights = Precision.parse(text).weights
            if self.from_disk and weights not in (AWQ, None):
                raise ValueError(f"{text}: the checkpoint on disk is AWQ's, W4 in groups of 128")
        if min(self.batches, default=0) < 1:
            raise ValueError(f"batches are {self.batches}: expected one or more positive numbers")
        positions = self.config.max_position_embeddings
        if self.prompt_tokens < 1 or self.new_tokens < 2:
            raise ValueError("a step is measured from one prompt token and two new ones on")
        if self.prompt_tokens + self.new_tokens > positions:
            raise ValueError(
                f"{self.prompt_tokens} prompt tokens and {self.new_tokens} new ones pass the "
                f"{positions} positions of the model"
            )

    @property
    def cases(self) -> int:
        """Number of rows that `run` gives."""
        return len(self.precisions) * len(self.batches)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what follows from its measured times: the roofline, and the share reached."""
    roofline = row.get("roofline_microseconds")
    if roofline is None:
        roofline = row["step_bytes"] / row["read_bandwidth_bytes_per_second"] * 1e6
    return dict(row) | {
        "decode_tokens_per_second": row["batch"] / row["decode_step_microseconds"] * 1e6,
        "roofline_microseconds": roofline,
        "roofline_tokens_per_second": row["batch"] / roofline * 1e6,
        "roofline_share": roofline / row["decode_step_microseconds"],
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of HEADERS."""
    row = figures(row)
    load, peak = row.get("load_seconds"), row.get("peak_bytes")
    return [
        row["precision"],
        str(row["batch"]),
        "" if load is None else f"{load:.1f} s",
        f"{row['time_to_first_token_seconds'] * 1e3:.1f} ms",
        f"{row['decode_tokens_per_second']:.0f}",
        f"{row['decode_step_microseconds']:.0f} µs",
        f"{row['sum_of_kernels_microseconds']:.0f} µs",
        f"{row['roofline_microseconds']:.0f} µs",
        f"{row['roofline_share']:.0%}",
        "" if peak is None else f"{peak / 1e9:.1f} GB",
    ]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row whose decoding and reading disagree; a NaN does."""
    return [
        f"{row['precision']}, batch {row['batch']}: log-probabilities of the new tokens differ by "
        f"{row['logprob_difference']:.2f} from those of one pass over the text, and the gate is "
        f"{GATE:.0f}"
        for row in rows
        if not row["logprob_difference"] < GATE
    ]


def step_bytes(lm: mpjax.LanguageModel, cache: PagedKVCache, tokens: float) -> float:
    """Bytes that a decoding step has to read: all weights, and `tokens` of the cache in each row.

    Of an embedding that is not the head as well, only a few rows are read: it is left out.
    """
    tied = lm.config.tie_word_embeddings
    embedding = 0 if tied else lm.model.embedding.get_value().nbytes
    return lm.nbytes - embedding + cache.nbytes * tokens / cache.capacity


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and gives its row."""
    bandwidth = measure.read_bandwidth()
    for text in sweep.precisions:
        lm, load_seconds = _load(sweep, Precision.parse(text))
        for batch in sweep.batches:
            row = {"precision": text, "layers": sweep.config.num_layers, "batch": batch}
            row |= {"load_seconds": load_seconds, "read_bandwidth_bytes_per_second": bandwidth}
            yield figures(row | _measure(lm, batch, sweep.prompt_tokens, sweep.new_tokens))
        del lm  # before the next one is made


def _load(sweep: Sweep, precision: Precision) -> tuple[mpjax.LanguageModel, float | None]:
    if not sweep.from_disk:
        model = random_model(Qwen3, sweep.config, precision.weights)
        return mpjax.LanguageModel(model, None, precision.kv, Path()), None
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_awq(Path(folder), sweep.config)
        begin = time.perf_counter()
        lm = mpjax.load(folder, precision=precision, progress=False)
        jax.block_until_ready(lm.model)
        return lm, time.perf_counter() - begin


def _measure(lm: mpjax.LanguageModel, batch: int, prompt: int, new: int) -> dict[str, Any]:
    peak_before = _peak_bytes()
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

    prefill_seconds, decode_seconds = [], []
    for _ in range(ROUNDS):
        state, seconds = prefill()
        prefill_seconds.append(seconds)
        begin = time.perf_counter()
        state = jit_decode(lm.model, state, sampling, limits, jnp.int32(new))
        state.tokens.block_until_ready()
        decode_seconds.append(time.perf_counter() - begin)
        said, scores = state.tokens[:1], state.logprobs[:1]
        del state  # its cache, before the next one is made
    peak = _peak_bytes()

    # The kernels of a few steps, undonated, so that the same state can be run again: the copy of
    # the cache that this costs is left out.
    steps = min(PROFILED_STEPS, new - 1)
    state, _ = prefill()
    undonated = jax.jit(lambda *arguments: decode(*arguments, stride=1).tokens)  # no step too many
    arguments = (lm.model, state, sampling, limits, jnp.int32(1 + steps))
    kernels = measure.kernel_microseconds(undonated, *arguments, iterations=3)
    kernels = {name: time / steps for name, time in kernels.items() if "memcpy" not in name.lower()}
    prefill_kernels = measure.kernel_microseconds(
        jax.jit(_read_prompt), lm.model, tokens, lengths, state.cache, iterations=1
    )
    return {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "prefill_seconds_with_compilation": prefill_seconds[0],
        "time_to_first_token_seconds": statistics.median(prefill_seconds[1:]),
        "decode_step_microseconds": statistics.median(decode_seconds[1:]) / (new - 1) * 1e6,
        "sum_of_kernels_microseconds": sum(kernels.values()),
        "step_bytes": step_bytes(lm, state.cache, prompt + new / 2),
        "weights_bytes": lm.nbytes,
        "cache_bytes": state.cache.nbytes,
        # The allocator never forgets its peak: a case's own is known only where it set it.
        "peak_bytes": peak if peak != peak_before else None,
        "logprob_difference": _difference(lm, jnp.concatenate([tokens[:1], said], 1), scores),
        "kernel_microseconds_per_step": _longest_first(kernels),
        "prefill_kernel_microseconds": _longest_first(prefill_kernels),
    }


def _longest_first(kernels: dict[str, float]) -> dict[str, float]:
    return dict(sorted(kernels.items(), key=lambda item: -item[1]))


def _peak_bytes() -> int | None:
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def _read_prompt(
    model: Decoder, tokens: jax.Array, lengths: jax.Array, cache: PagedKVCache
) -> jax.Array:
    cache = dataclasses.replace(cache, lengths=jnp.zeros_like(cache.lengths))
    return model.step(tokens, lengths, cache, fresh=True)[0]


def _difference(lm: mpjax.LanguageModel, text: jax.Array, scores: jax.Array) -> float:
    """Mean absolute difference, in nats, between decoding's scores and those of one pass.

    text: int32 [1, prompt and new tokens]; scores: float32 [1, new tokens], of the new ones. The
    pass over the whole text has no cache, and other kernels than decoding.
    """

    @jax.jit
    def read(model: Decoder, text: jax.Array) -> jax.Array:
        logits = model(text)[:, -scores.shape[1] - 1 : -1]
        logprobs = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logprobs, text[:, -scores.shape[1] :, None], -1)[..., 0]

    return float(jnp.abs(read(lm.model, text) - scores).mean())
