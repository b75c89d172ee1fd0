"""The generation loop, on arrays: prefill, then one `while_loop` of decoding steps.

One compiled loop serves both ways of generating. `decode` runs until a step that is an argument,
not a constant, so that streaming calls it for a few tokens at a time and `generate_tokens` once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import most_new_tokens
from mpjax.kernels import KVFormat, PagedKVCache, QuantizedTensor, device
from mpjax.kernels.checks import are_between, as_arrays, require_type
from mpjax.kernels.gemm.plans import Problem, runs_by_warpgroups
from mpjax.models import Decoder
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling, logprobs, sample

STRIDE = 8
STOP_IDS = 8  # their number is rounded up to a multiple


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stop_ids", "maximum"],
    meta_fields=["room"],
)
@dataclasses.dataclass(frozen=True)
class Limits:
    """When a row ends.

    stop_ids: int32 [any number], tokens that end it. maximum: int32 [batch], new tokens at most.
    room: new tokens that a state can hold (static).
    """

    stop_ids: jax.Array
    maximum: jax.Array
    room: int

    @classmethod
    def of(cls, batch: int, stop_ids: Any, maximum: Any, room: int) -> Limits:
        """Limits of a batch; the maximum is a number for all rows, or one for each."""
        ids = jnp.asarray(stop_ids, jnp.int32)
        # What no vocabulary has is never drawn: so one more stop token compiles nothing anew.
        padding = (0, -len(ids) % STOP_IDS)
        return cls(
            jnp.pad(ids, padding, constant_values=jnp.iinfo(jnp.int32).max),
            jnp.full(batch, maximum, jnp.int32),
            room,
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache",
        "keys",
        "tokens",
        "logprobs",
        "counts",
        "finished",
        "seen",
        "step",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """A batch in the middle of generation; all of it is carried through the loop.

    cache: what the rows have read so far, all but their newest token.
    keys: one PRNG key per row [batch].
    tokens, logprobs: new tokens int32 and their log-probabilities float32 [batch, room].
    counts: int32 [batch], new tokens of each row. finished: bool [batch].
    seen: bool [batch, vocabulary], tokens of prompt and text; None without repetition penalty.
    step: int32 scalar, tokens that the longest row has.
    """

    cache: PagedKVCache
    keys: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    finished: jax.Array
    seen: jax.Array | None
    step: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "logprobs", "stopped", "finite"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GeneratedTokens:
    """What generate_tokens returns.

    tokens: int32 [batch, max_new_tokens], the stop token included, zeros after each row's end.
    lengths: int32 [batch], tokens that each row generated.
    logprobs: float32 [batch, max_new_tokens], of each token under the unmodified softmax.
    stopped: bool [batch], whether a stop token ended the row rather than its maximum.
    finite: bool [batch], whether the model computed no NaN or infinite logits for the row. Where it
        did, the tokens mean nothing: in float16 numbers beyond 65504 are infinite, and
        `load(..., dtype="bfloat16")` has room for them.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    stopped: jax.Array
    finite: jax.Array


def prefill(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: PagedKVCache,
    keys: jax.Array,
    sampling: Sampling,
    limits: Limits,
) -> DecodingState:
    """Reads the prompts into an empty cache and draws the first token of each row.

    tokens: int [batch, tokens], padded on the right; lengths: int32 [batch].
    """
    batch, room = tokens.shape[0], limits.room
    logits, cache = model.step(tokens, lengths, cache, fresh=True)
    seen = None
    if sampling.repetition_penalty is not None:
        real = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        seen = jnp.zeros((batch, logits.shape[-1]), bool)
        seen = seen.at[jnp.arange(batch)[:, None], tokens].max(real)
    state = DecodingState(
        cache=cache,
        keys=keys,
        tokens=jnp.zeros((batch, room), jnp.int32),
        logprobs=jnp.zeros((batch, room), jnp.float32),
        counts=jnp.zeros(batch, jnp.int32),
        finished=limits.maximum <= 0,
        seen=seen,
        step=jnp.int32(0),
    )
    return _draw(state, logits, sampling, limits, ~state.finished)


def decode(
    model: Decoder,
    state: DecodingState,
    sampling: Sampling,
    limits: Limits,
    until: jax.Array,
    *,
    stride: int | None = None,
) -> DecodingState:
    """Generates until the longest row has `until` tokens (int32 scalar) or all rows are finished.

    One `while_loop`: no token visits the host. Donate `state` to `jit`, and the cache is written
    in place.

    stride: steps between two looks at whether there is more to do (static). On a GPU the host takes
        that look, and the GPU waits for it: STRIDE there, 1 elsewhere. Steps past the end change
        nothing.
    """
    stride = stride or (STRIDE if device.on_gpu() else 1)

    def unfinished(state: DecodingState) -> jax.Array:
        return (state.step < until) & ~state.finished.all()

    def advance(_: int, state: DecodingState) -> DecodingState:
        newest = jnp.take_along_axis(
            state.tokens, jnp.full_like(state.counts, state.step - 1)[:, None], 1
        )
        # A finished row adds nothing to the cache; what it computes is thrown away.
        alive = ~state.finished & (state.step < until)
        logits, cache = model.step(newest, alive.astype(jnp.int32), state.cache)
        return _draw(dataclasses.replace(state, cache=cache), logits, sampling, limits, alive)

    def advance_all(state: DecodingState) -> DecodingState:
        # A loop whose length is known is launched ahead of the GPU.
        return jax.lax.fori_loop(0, stride, advance, state) if stride > 1 else advance(0, state)

    return jax.lax.while_loop(unfinished, advance_all, state)


def _draw(
    state: DecodingState,
    logits: jax.Array,
    sampling: Sampling,
    limits: Limits,
    alive: jax.Array,
) -> DecodingState:
    """Samples a token for each row that is alive (bool [batch]) and records it."""
    batch, vocabulary = logits.shape
    is_stop = jnp.zeros(vocabulary, bool).at[limits.stop_ids].set(True)
    allowed = logits
    if sampling.min_new_tokens is not None:
        too_short = state.counts < jnp.asarray(sampling.min_new_tokens, jnp.int32)
        allowed = jnp.where(too_short[:, None] & is_stop[None], -jnp.inf, logits)
    drawn = sample(allowed, step_keys(state.keys, state.step), sampling, state.seen)
    chance = logprobs(logits, drawn)
    counts = state.counts + alive.astype(jnp.int32)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(batch), drawn].max(alive)

    def record(tokens: jax.Array, new: jax.Array) -> jax.Array:
        # What is not alive keeps its zeros; after the last step there is no room for more.
        old = jax.lax.dynamic_slice_in_dim(tokens, state.step, 1, axis=1)
        new = jnp.where(alive[:, None], new[:, None], old)
        return jax.lax.dynamic_update_slice_in_dim(tokens, new, state.step, axis=1)

    return dataclasses.replace(
        state,
        tokens=record(state.tokens, drawn),
        logprobs=record(state.logprobs, chance),
        counts=counts,
        finished=state.finished | (alive & (is_stop[drawn] | (counts >= limits.maximum))),
        seen=seen,
        step=state.step + alive.any().astype(jnp.int32),
    )


# The state is donated, so that the loop owns the cache's buffers; the model never is.
jit_prefill = jax.jit(prefill, donate_argnames="cache")
jit_decode = jax.jit(decode, static_argnames="stride", donate_argnames="state")
jit_decode_in_turn = jax.jit(
    decode,
    static_argnames="stride",
    donate_argnames="state",
    compiler_options={"xla_gpu_enable_pdl": False},
)


def decode_program(model: Decoder, state: DecodingState) -> Callable[..., DecodingState]:
    """`decode` as it is compiled for this model and batch, with the state donated.

    On Hopper, XLA launches a kernel before the last one has ended. That gains where Triton's
    kernels follow each other, and loses beside those of warpgroups, which are not launched early:
    where there are any, no kernel is. Inside of another `jit` that is for its caller to say.
    """
    # Inside of a `jit` all that is made is traced, also where model and state are not.
    is_traced = isinstance(jnp.zeros(()), jax.core.Tracer)
    in_turn = not is_traced and _has_warpgroups(model, len(state.tokens))
    return jit_decode_in_turn if in_turn else jit_decode


def _has_warpgroups(model: Decoder, batch: int) -> bool:
    """Whether warpgroups multiply any weight in a step of so many rows."""
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    weights = [leaf for leaf in leaves if isinstance(leaf, QuantizedTensor)]
    different = {(weight.format, weight.shape): weight for weight in weights}
    return any(runs_by_warpgroups(Problem.of(batch, weight)) for weight in different.values())


def generate_tokens(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: Any = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | Mapping[str, Any] | None = None,
    kv_format: KVFormat | str | None = None,
) -> GeneratedTokens:
    """Continues a batch of prompts: pure, and jit-able with `max_new_tokens` and formats static.

    tokens: int [batch, tokens], prompts padded on the right to one length; lengths: int32 [batch].
    seeds: integers [batch], or JAX's keys (typed [batch], raw uint32 [batch, 2]; of threefry2x32),
        one per row, which alone decide what a row draws; 0 … batch − 1 by default. Greedy
        generation uses none.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}; greedy by default. Without
        stop_ids, rows end at those of the model's configuration, which are the eos_token_id of
        config.json. `generate` stops at `lm.tokenizer.stop_ids`: also at eos_token, and at those of
        generation_config.json in the place of config.json's. Pass these for the same ends.
    kv_format: of the cache, which is created here and dropped at the end, as KVLayout takes it;
        KV16 by default. Its pages have the usual size, which changes no result but for rounding.

    A row's output does not depend on its neighbours, but for rounding: kernels choose their tiles,
    and with them the order of sums, by the batch's size.

    Raises ValueError for shapes, dtypes and limits that don't fit, and, where values are known, for
    an empty prompt, a token out of range, or more tokens than the model has positions.
    """
    require_type("model", model, Decoder, hint=", such as lm.model")
    tokens, lengths = as_arrays("generate_tokens", tokens=tokens, lengths=lengths)
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens have shape {tokens.shape}; expected [batch, tokens], also for one prompt"
        )
    batch, padded = tokens.shape
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths have shape {lengths.shape}; tokens {tokens.shape} need ({batch},)"
        )
    for name, array in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} are {array.dtype}; expected integers")
    sampling = Sampling.of(sampling)
    max_new_tokens = most_new_tokens(max_new_tokens, sampling.min_new_tokens)
    vocabulary = model.config.vocab_size
    if not are_between(tokens, 0, vocabulary - 1):
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the model's vocabulary")
    if not are_between(lengths, 1, padded):
        raise ValueError(f"lengths are {lengths.tolist()}; each must be from 1 to {padded}")
    positions = model.config.max_position_embeddings
    if not are_between(lengths, 1, positions - max_new_tokens):
        raise ValueError(
            f"lengths are {lengths.tolist()}, and {max_new_tokens} new tokens would pass the "
            f"{positions} positions of this model: shorten the prompts, ask for fewer, or load the "
            "model with max_positions"
        )
    sampling, stop_ids = sampling.split(model.config.stop_ids)
    limits = Limits.of(batch, stop_ids, max_new_tokens, max_new_tokens)
    keys = row_keys(np.arange(batch) if seeds is None else seeds, batch)
    cache = model.create_cache(
        batch, padded + max_new_tokens, KVFormat() if kv_format is None else kv_format
    )
    lengths = lengths.astype(jnp.int32)
    state = jit_prefill(model, tokens, lengths, cache, keys, sampling, limits)
    run = decode_program(model, state)
    state = run(model, state, sampling, limits, jnp.int32(max_new_tokens))
    return collect(state, limits)


def collect(state: DecodingState, limits: Limits) -> GeneratedTokens:
    """The tokens that a state has so far."""
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.counts - 1, 0)[:, None], 1)
    stopped = (last == limits.stop_ids[None]).any(-1) & (state.counts > 0)
    finite = ~jnp.isnan(state.logprobs).any(-1)
    return GeneratedTokens(state.tokens, state.counts, state.logprobs, stopped, finite)
