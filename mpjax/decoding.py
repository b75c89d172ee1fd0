"""The generation loop on arrays: prefill, then one `while_loop` of decoding steps.

The step at which `decode` stops is an array argument, so one compiled program serves both ways of
generating: streaming calls it for a few tokens at a time, and `generate_tokens` once.
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
from mpjax.decoding_state import DecodingState, Limits, repeat
from mpjax.decoding_step import BatchRule, advance, draw
from mpjax.kernels import KVFormat, PagedKVCache, QuantizedTensor
from mpjax.kernels.checks import are_between, as_arrays, is_known, require_type
from mpjax.kernels.gemm.plans import Problem, runs_by_warpgroups
from mpjax.models import Decoder, Experts
from mpjax.models.rereading import reads_again
from mpjax.models.sharded import ShardedDecoder
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling
from mpjax.speculation import loop
from mpjax.speculation.proposer import Proposer, Speculated, read_speculate


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "logprobs", "stopped", "finite", "speculated"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GeneratedTokens:
    """The new tokens of a batch, as `generate_tokens` returns them.

    tokens: int32 [batch, max_new_tokens], the stop token included, zeros after each row's end.
    lengths: int32 [batch], number of new tokens of each row.
    logprobs: float32 [batch, max_new_tokens], natural logarithm of each token's probability under
        the softmax of the unmodified logits.
    stopped: bool [batch], whether a stop token ended the row rather than its maximum.
    finite: bool [batch], whether all logits of the row were finite. If not, its tokens mean
        nothing. float16 has no numbers beyond 65504: load such a model with dtype="bfloat16".
    speculated: how many tokens were proposed and accepted; None without speculation.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    stopped: jax.Array
    finite: jax.Array
    speculated: Speculated | None = None


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

    tokens: int [batch, tokens], padded on the right. lengths: int32 [batch], tokens of each prompt.
    keys: typed PRNG keys [batch].
    """
    batch, room = tokens.shape[0], limits.room
    logits, cache = model.step(tokens, lengths, cache, fresh=True)
    most = tokens.shape[1] + room - 1  # in the cache, which never holds the last token
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
        prompts=tokens.astype(jnp.int32) if reads_again(model.config, most) else None,
    )
    rule = BatchRule(sampling, limits)
    return draw(state, logits, rule, ~state.finished, divided=model.shards > 1)


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

    The loop is one `while_loop`, without a copy to the host. With `state` donated to `jit`, the
    cache is written in place.

    stride: decoding steps between two checks whether to go on (static); see `repeat`.
    """

    def unfinished(state: DecodingState) -> jax.Array:
        return (state.step < until) & ~state.finished.all()

    rule = BatchRule(sampling, limits)

    def go_on(state: DecodingState) -> DecodingState:
        return advance(model, state, rule, ~state.finished & (state.step < until))

    return repeat(go_on, unfinished, state, stride)


# The cache and the state are donated, so that XLA reuses their buffers. The model is not.
jit_prefill = jax.jit(prefill, donate_argnames="cache")
_jit = functools.partial(jax.jit, static_argnames="stride", donate_argnames="state")
_jit_in_turn = functools.partial(_jit, compiler_options={"xla_gpu_enable_pdl": False})
jit_decode, jit_decode_in_turn = _jit(decode), _jit_in_turn(decode)
jit_speculate, jit_speculate_in_turn = _jit(loop.decode), _jit_in_turn(loop.decode)
# Traced arrays have no buffers to donate; `vmap` warns where a donated one gets another shape.
_traced_prefill = jax.jit(prefill)
_traced_decode, _traced_speculate = (
    jax.jit(function, static_argnames="stride") for function in (decode, loop.decode)
)


def decode_program(model: Decoder, state: DecodingState) -> Callable[..., DecodingState]:
    """The jitted `decode` for this model and batch, with the state donated.

    On Hopper, XLA launches a kernel before the previous one has ended (programmatic dependent
    launch). Early launches make sequences of Triton's kernels faster, but steps with warpgroup
    kernels, which are never launched early, slower. So they are off if any product runs on
    warpgroups. Inside another `jit` the compiler options are its caller's.
    """
    if not is_known(state.logprobs):
        return _traced_decode
    return jit_decode_in_turn if has_warpgroups(model, len(state.tokens)) else jit_decode


def speculative_program(
    model: Decoder, state: DecodingState, speculate: Proposer
) -> Callable[..., DecodingState]:
    """The jitted `speculation.loop.decode`, called as the program of `decode_program` is.

    The state is one that `loop.begin` has prepared.
    """
    if not is_known(state.logprobs):
        return functools.partial(_traced_speculate, speculate)
    rows = len(state.tokens)
    in_turn = any(has_warpgroups(model, n) for n in (rows, rows * (speculate.k + 1)))
    return functools.partial(jit_speculate_in_turn if in_turn else jit_speculate, speculate)


def has_warpgroups(model: Decoder, batch: int) -> bool:
    """Whether any weight is multiplied by a warpgroup kernel in a step of `batch` rows.

    Stacks of experts have plans of their own.
    """
    of_experts = (
        layer.mlp.runs_by_warpgroups(batch)
        for layer in _share(model).layers
        if isinstance(layer.mlp, Experts)
    )
    return any(of_experts) or any(map(runs_by_warpgroups, _problems(model, batch)))


def _share(model: Decoder) -> Decoder:
    """The model as one device computes it."""
    return model.share_shapes() if isinstance(model, ShardedDecoder) else model


def _problems(model: Decoder, batch: int) -> list[Problem]:
    """The products of a step of `batch` rows, each once, except for those of experts."""
    leaves = jax.tree.leaves(_share(model), is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    matrices = (leaf for leaf in leaves if isinstance(leaf, QuantizedTensor))
    weights = [matrix for matrix in matrices if len(matrix.shape) == 2]
    different = {(weight.format, weight.shape): weight for weight in weights}
    return [Problem.of(batch, weight) for weight in different.values()]


def generate_tokens(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    seeds: Any = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | Mapping[str, Any] | None = None,
    kv_format: KVFormat | str | None = None,
    speculate: Proposer | None = None,
) -> GeneratedTokens:
    """Continues a batch of prompts, as a pure function of arrays.

    Works under `jit` with `max_new_tokens` and `kv_format` static.

    tokens: int [batch, tokens], prompts padded on the right to one length.
    lengths: int [batch], tokens of each prompt.
    seeds: one for each row: integers [batch], or JAX keys of threefry2x32 (typed [batch], or raw
        uint32 [batch, 2]); 0 … batch − 1 by default. A row's draws depend on its seed alone. Greedy
        generation uses none.
    max_new_tokens: the most new tokens of each row.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}; greedy by default, also for
        a model whose files say otherwise (`lm.sampling`), which is not an argument here. Without
        stop_ids, rows end at the stop ids of the model's configuration (eos_token_id in
        config.json). `generate` instead ends them at `lm.tokenizer.stop_ids`, which come from
        generation_config.json and eos_token: pass these as stop_ids for the same ends.
    kv_format: of the cache, such as `KV8`; KV16 by default. The cache is created here, with pages
        of 128 tokens, and dropped at the end.
    speculate: proposes tokens that the model verifies several at a time, without changing what it
        generates: an Ngram or a Draft; see `generate`.

    A row's output does not depend on its neighbours, except for rounding: kernels choose their
    tiles, and so the order of sums, by the size of the batch.

    Raises ValueError for shapes, dtypes and limits that don't fit. Outside `jit` it also raises for
    an empty prompt, a token id outside the vocabulary, and more tokens than the model has
    positions.
    """
    require_type("model", model, Decoder, hint=", such as lm.model")
    tokens, lengths = as_arrays("generate_tokens", tokens=tokens, lengths=lengths)
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens have shape {tokens.shape}: expected [batch, tokens], also for one prompt"
        )
    batch, padded = tokens.shape
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths have shape {lengths.shape}: expected ({batch},), as tokens are {tokens.shape}"
        )
    for name, array in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} are {array.dtype}: expected integers")
    sampling, speculate = Sampling.of(sampling), read_speculate(speculate)
    max_new_tokens = most_new_tokens(max_new_tokens, sampling.min_new_tokens)
    vocabulary = model.config.vocab_size
    if not are_between(tokens, 0, vocabulary - 1):
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the model's vocabulary")
    if not are_between(lengths, 1, padded):
        raise ValueError(f"lengths are {lengths.tolist()}: expected each from 1 to {padded}")
    positions = model.config.max_position_embeddings
    if not are_between(lengths, 1, positions + 1 - max_new_tokens):  # no position for the last
        raise ValueError(
            f"lengths are {lengths.tolist()}, and {max_new_tokens} new tokens would pass the "
            f"{positions} positions of this model: shorten the prompts, ask for fewer, or load the "
            "model with max_positions"
        )
    if speculate is not None:
        longest = int(np.max(lengths)) if is_known(lengths) else padded
        speculate.require(None, longest + max_new_tokens - 1)
    sampling, stop_ids = sampling.split(model.config.stop_ids, vocabulary)
    limits = Limits.of(batch, stop_ids, max_new_tokens, max_new_tokens)
    keys = row_keys(np.arange(batch) if seeds is None else seeds, batch)
    cache = model.create_cache(
        batch, padded + max_new_tokens, KVFormat() if kv_format is None else kv_format
    )
    lengths = lengths.astype(jnp.int32)
    arguments = (model, tokens, lengths, cache, keys, sampling, limits)
    state = (jit_prefill if is_known(arguments) else _traced_prefill)(*arguments)
    if speculate is None:
        run = decode_program(model, state)
    else:
        state = loop.begin(speculate, state, tokens, lengths)
        run = speculative_program(model, state, speculate)
    state = run(model, state, sampling, limits, jnp.int32(max_new_tokens))
    return collect(state, limits)


def collect(state: DecodingState, limits: Limits) -> GeneratedTokens:
    """The new tokens that a state has so far."""
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.counts - 1, 0)[:, None], 1)
    stopped = (last == limits.stop_ids[None]).any(-1) & (state.counts > 0)
    finite = ~jnp.isnan(state.logprobs).any(-1)
    speculated = None if state.speculation is None else state.speculation.done
    return GeneratedTokens(state.tokens, state.counts, state.logprobs, stopped, finite, speculated)
