"""Runs a batch of prompts through prefill and decoding, from the host's side."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import most_new_tokens, require_known_ids, stop_strings
from mpjax.buckets import bucket_rows, bucket_tokens
from mpjax.decoding import decode_program, jit_prefill, speculative_program
from mpjax.decoding_state import DecodingState, Limits
from mpjax.finite import NotFiniteError
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.memory import has_free_on, require_free_on
from mpjax.prompts import Prompts, encode
from mpjax.random_keys import row_keys
from mpjax.row_text import RowText
from mpjax.sampling import Sampling, pad_sampling
from mpjax.speculation import loop
from mpjax.speculation.proposer import Proposer, read_speculate
from mpjax.speculation.report import SpeculationReport
from mpjax.tokenizer import Tokenizer

# Decoding steps between two reads of the tokens, when streaming or with stop strings. A read costs
# a round trip to the device, and only a read can notice a stop string.
CHUNK = 8


@dataclasses.dataclass
class Batch:
    """A batch in the middle of generation.

    state: arrays on the device; padding rows follow the prompts' rows.
    rows: tokens and text of each prompt's row, as of the last `read`.
    stop_ids: token ids that end a row. prompt_tokens: number of tokens of each prompt.
    dtype: of the model. prefill_seconds, decode_seconds: wall time so far.
    logprobs: float32 [rows with padding, room], log-probabilities of the tokens.
    speculation: what speculation has gained, as of the last `read`; None without it.
    """

    state: DecodingState
    rows: list[RowText]
    stop_ids: tuple[int, ...]
    prompt_tokens: list[int]
    dtype: str
    prefill_seconds: float
    decode_seconds: float = 0.0
    logprobs: np.ndarray = dataclasses.field(init=False)
    speculation: SpeculationReport | None = None

    def read(self) -> None:
        """Copies new tokens from the device to `rows`, in one round trip.

        Raises NotFiniteError for a row with a NaN or infinite logit.
        """
        state = self.state
        done = None if state.speculation is None else state.speculation.done
        tokens, self.logprobs, counts, finished, done = jax.device_get(
            (state.tokens, state.logprobs, state.counts, state.finished, done)
        )
        if done is not None:
            numbers = done.proposed, done.accepted, done.steps, np.maximum(counts - 1, 0)
            lists = (array[: len(self.rows)].tolist() for array in numbers)
            self.speculation = SpeculationReport(*lists)
        for index, row in enumerate(self.rows):
            row.push(tokens[index, len(row.tokens) : counts[index]].tolist())
            if np.isnan(self.logprobs[index, : len(row.tokens)]).any():
                raise NotFiniteError("prompt", index, self.dtype)
            if finished[index]:
                row.finish()

    def stop_rows(self) -> None:
        """Marks the rows that a stop string has ended as finished on the device."""
        stopped = np.zeros(self.state.finished.shape, bool)
        stopped[: len(self.rows)] = [row.stopped for row in self.rows]
        if stopped.any():
            finished = self.state.finished | stopped
            self.state = dataclasses.replace(self.state, finished=finished)

    @property
    def shortest(self) -> int | None:
        """The fewest tokens of a row that has not ended; None if all have."""
        return min((len(row.tokens) for row in self.rows if not row.ended), default=None)

    def finish_reason(self, row: int) -> str:
        """The reason why a row has ended: `stop` (a stop token or string) or `length`."""
        found = self.rows[row]
        return "stop" if found.stopped or found.tokens[-1] in self.stop_ids else "length"


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments of `generate` but the model; seeds of None are row numbers."""

    prompts: Prompts
    max_new_tokens: int
    sampling: Sampling | Mapping[str, Any] | None
    stop: str | Sequence[str] | None
    seeds: Any
    chat_template: str | None
    speculate: Proposer | None = None


def run(lm: LanguageModel, job: Job, *, watch: bool) -> Iterator[Batch]:
    """Generates in steps: yields one Batch after prefill, and again after each chunk of decoding.

    A chunk has CHUNK decoding steps if there are stop strings, which only the host can see, or if
    the caller watches; otherwise it is all of decoding. The batch is updated in place between
    yields. Errors are those of `generate`.

    watch: whether the caller shows tokens while they are generated (streaming).
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    # Check the arguments, and encode the prompts.
    stop, sampling = stop_strings(job.stop), Sampling.of(job.sampling, lm.sampling)
    speculate = read_speculate(job.speculate)
    max_new_tokens = most_new_tokens(job.max_new_tokens, sampling.min_new_tokens)
    tokenizer = lm.require_tokenizer()
    encoded = encode(tokenizer, job.prompts, lm.config.vocab_size, job.chat_template)
    _check_lengths(lm, encoded, max_new_tokens)
    if speculate is not None:
        speculate.require(tokenizer, max(map(len, encoded)) + max_new_tokens - 1)
    # Pad rows, prompts and room for new tokens to few sizes, each of which compiles a program.
    padded, room = bucket_tokens(max(map(len, encoded))), bucket_tokens(max_new_tokens)
    rows = _choose_rows(lm, len(encoded), padded, room, speculate)
    sampling = pad_sampling(sampling, len(encoded), rows)
    seeds = np.arange(len(encoded)) if job.seeds is None else job.seeds
    keys = row_keys(seeds, len(encoded), rows)
    tokens, lengths = _pad(encoded, rows, padded)
    sampling, ids = sampling.split(tokenizer.stop_ids or lm.config.stop_ids, lm.config.vocab_size)
    stop_ids = (*(int(i) for i in np.asarray(ids)), *special_ids(tokenizer, stop))
    maximum = np.where(np.arange(rows) < len(encoded), max_new_tokens, 0)  # 0 for padding rows
    limits = Limits.of(rows, stop_ids, maximum, room)

    begin = time.perf_counter()
    model = lm.for_device
    state = jit_prefill(
        model,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        lm.model.create_cache(rows, padded + room, lm.kv_format, lm.page_size),
        keys,
        sampling,
        limits,
    )
    if speculate is not None:
        state = loop.begin(speculate, state, jnp.asarray(tokens), jnp.asarray(lengths))
    minima = np.broadcast_to(np.asarray(sampling.min_new_tokens), rows)
    texts = [
        RowText(tokenizer, ids, stop, int(minimum))
        for ids, minimum in zip(encoded, minima, strict=False)
    ]
    state.tokens.block_until_ready()
    seconds = time.perf_counter() - begin
    batch = Batch(state, texts, stop_ids, [len(ids) for ids in encoded], lm.config.dtype, seconds)
    batch.read()
    yield batch
    if speculate is None:
        decode = decode_program(model, state)
    else:
        decode = speculative_program(model, state, speculate)
    chunk = CHUNK if watch or stop else max_new_tokens
    while (done := batch.shortest) is not None:
        batch.stop_rows()
        # Only the time of decoding counts, not the caller's time between two chunks.
        begin = time.perf_counter()
        until = min(done + chunk, max_new_tokens)
        batch.state = decode(model, batch.state, sampling, limits, jnp.int32(until))
        batch.read()  # waits for the device
        batch.decode_seconds += time.perf_counter() - begin
        yield batch


def special_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> list[int]:
    """Ids of special tokens that are stop strings: they have no text, so they stop by id."""
    named = (tokenizer.backend.token_to_id(text) for text in stop)
    return [i for i in named if i is not None and i in tokenizer.special_ids]


def _check_lengths(lm: LanguageModel, encoded: Sequence[Sequence[int]], new_tokens: int) -> None:
    positions = lm.config.max_position_embeddings
    for index, ids in enumerate(encoded):
        if len(ids) + new_tokens - 1 > positions:  # the last token needs no position
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, and with {new_tokens} new ones it would "
                f"pass the {positions} positions of this model: shorten it, ask for fewer, or load "
                "the model with max_positions"
            )
    require_known_ids(encoded, lm.config.vocab_size)


def _choose_rows(
    lm: LanguageModel, batch: int, padded: int, room: int, speculate: Proposer | None = None
) -> int:
    """The number of rows to which a batch is padded: `batch` itself if memory is short.

    Raises DeviceMemoryError where it lacks for the batch itself.
    """
    needed = functools.partial(_needed_bytes, lm, padded=padded, room=room, speculate=speculate)
    rows = bucket_rows(batch)
    rows = rows if has_free_on(lm.model.mesh, needed(rows)) else batch
    what = f"a {lm.kv_format} cache for {rows} × {padded + room} tokens, with prefill,"
    require_free_on(lm.model.mesh, needed(rows), what)
    return rows


def _needed_bytes(
    lm: LanguageModel, rows: int, *, padded: int, room: int, speculate: Proposer | None = None
) -> int:
    """Bytes of caches and of a layer's widest activations, inside the MLP, during prefill.

    The bytes are those of all devices together. Each device has its share of the channels inside
    the MLP, and the whole residual stream.
    """

    def caches() -> Any:
        own = None if speculate is None else speculate.create(rows, padded + room)
        return lm.model.create_cache(rows, padded + room, lm.kv_format, lm.page_size), own

    shapes = jax.eval_shape(caches)
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    wide = 3 * lm.config.intermediate_size + 3 * lm.config.hidden_size * lm.devices
    return cache + rows * padded * wide * jnp.dtype(lm.config.dtype).itemsize


def _pad(encoded: Sequence[Sequence[int]], rows: int, padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts: tokens int32 [rows, padded] and lengths int32 [rows].

    A padding row has one token, since an empty row has no last token to predict from.
    """
    tokens, lengths = np.zeros((rows, padded), np.int32), np.ones(rows, np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
        lengths[row] = len(ids)
    return tokens, lengths
