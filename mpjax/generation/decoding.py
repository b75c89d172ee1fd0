"""The generation loop on arrays: prefill, then one `while_loop` of decoding steps.

`generate_tokens` is a pure function of arrays. Strings, streaming and continuous batching are in
`mpjax.engine`, whose programs repeat the same step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import most_new_tokens
from mpjax.constraints.automaton import Automaton, read_constraint
from mpjax.generation.loop import Loop, repeat
from mpjax.generation.prefill import read_prompts
from mpjax.generation.speculation import steps
from mpjax.generation.speculation.argument import read_speculate
from mpjax.generation.speculation.proposer import Proposer, Speculated
from mpjax.generation.state import State
from mpjax.generation.step import Read, step
from mpjax.kernels import KVFormat, QuantizedTensor
from mpjax.kernels.checks import are_between, as_arrays, is_known, require_type
from mpjax.kernels.gemm.plans import Problem, runs_by_warpgroups
from mpjax.models import Decoder, Experts
from mpjax.models.low_rank import read_numbers
from mpjax.models.rereading import reads_again
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.state import DecoderCache
from mpjax.models.watch import Capture, Captured, Steer
from mpjax.sampling.controls import controls
from mpjax.sampling.processors import Attachment, Processor, attach, read, read_processors
from mpjax.sampling.rules import read_rows_rules
from mpjax.sampling.settings import RowSettings, Samplings, read_samplings


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "logprobs", "stopped", "finite", "speculated", "captured"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GeneratedTokens:
    """The new tokens of a batch, as `generate_tokens` returns them.

    tokens: int32 [batch, max_new_tokens], the stop token included, zeros after each row's end.
    lengths: int32 [batch], number of new tokens of each row.
    logprobs: float32 [batch, max_new_tokens], natural logarithm of each token's probability under
        the softmax of the unmodified logits.
    stopped: bool [batch], whether a stop token ended the row, rather than max_new_tokens.
    finite: bool [batch], whether all logits of the row were finite. If not, its tokens are
        meaningless. float16 overflows beyond 65504: load such a model with dtype="bfloat16".
    speculated: how many tokens were proposed and accepted; None without speculation.
    captured: the captured activations, by point and layer: [batch, positions, ...] for prompt and
        new tokens, then zeros; None without `capture`.
    """

    tokens: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    stopped: jax.Array
    finite: jax.Array
    speculated: Speculated | None = None
    captured: Captured | None = None


def prefill(
    model: Decoder,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: DecoderCache,
    settings: RowSettings,
    columns: int,
    processors: Attachment = (),
) -> Loop:
    """Prefills an empty cache with the prompts and draws the first token of each row.

    tokens: int [batch, tokens], padded on the right. lengths: int32 [batch], tokens of each prompt.
    columns: the most new tokens of a row (static). processors: of empty rows.
    """
    batch, padded = tokens.shape
    none = jnp.zeros(batch, jnp.int32)
    settings = jax.tree.map(jnp.asarray, settings)
    state = State(
        cache,
        none,
        none,
        settings.max_new_tokens > 0,
        settings,
        processors=read(processors, tokens.astype(jnp.int32), lengths),
    )
    most = padded + columns - 1  # tokens in the cache, which never holds the last one
    prompts = tokens.astype(jnp.int32) if reads_again(model.config, most) else None
    loop = Loop.begin(state, columns, model.columns, prompts)

    def read_all(cache: DecoderCache) -> Read:
        return Read(*read_prompts(model, tokens, lengths, cache))

    return loop.record(*step(model, state, read_all, state.running))


def decode(model: Decoder, loop: Loop, until: jax.Array, *, stride: int | None = None) -> Loop:
    """Decodes until the longest row has `until` tokens (int32 scalar) or all rows have ended.

    The loop is one `while_loop`, without a copy to the host. With `loop` donated to `jit`, the
    cache is written in place.

    stride: decoding steps between two checks of the loop's condition (static); see `repeat`.
    """

    def unfinished(loop: Loop) -> jax.Array:
        return loop.goes_on(until).any()

    def advance(loop: Loop) -> Loop:
        return loop.advance(model, loop.goes_on(until))

    return repeat(advance, unfinished, loop, stride)


# The cache and the loop are donated, so that XLA reuses their buffers. The model is not.
jit_prefill = jax.jit(prefill, static_argnames="columns", donate_argnames="cache")
_jit = functools.partial(jax.jit, static_argnames="stride", donate_argnames="loop")
_jit_in_turn = functools.partial(_jit, compiler_options={"xla_gpu_enable_pdl": False})
jit_decode, jit_decode_in_turn = _jit(decode), _jit_in_turn(decode)
jit_speculate, jit_speculate_in_turn = _jit(steps.decode), _jit_in_turn(steps.decode)
jit_begin = jax.jit(steps.create_speculation, donate_argnames="own")
# Without donation: traced arrays have no buffers, and `vmap` warns if a donated shape changes.
_traced_prefill = jax.jit(prefill, static_argnames="columns")
_traced_begin = jax.jit(steps.create_speculation)
_traced_decode, _traced_speculate = (
    jax.jit(function, static_argnames="stride") for function in (decode, steps.decode)
)


def decode_program(model: Decoder, loop: Loop) -> Callable[..., Loop]:
    """The jitted `decode` for this model and batch, with the loop donated.

    On Hopper, XLA launches a kernel before the previous one has ended (programmatic dependent
    launch). Early launches make sequences of Triton's kernels faster, but steps with warpgroup
    kernels, which are never launched early, slower. So they are off if any product runs on
    warpgroups. Inside another `jit`, that jit's compiler options apply.
    """
    if not is_known(loop.logprobs):
        return _traced_decode
    return jit_decode_in_turn if has_warpgroups(model, len(loop.tokens)) else jit_decode


def begin_speculation(
    proposer: Proposer, loop: Loop, tokens: jax.Array, lengths: jax.Array
) -> Loop:
    """The loop after prefill, with a Speculation whose proposer has seen the prompts.

    tokens, lengths: as for `prefill`.
    """
    batch, padded = tokens.shape
    own = proposer.create(batch, padded + loop.tokens.shape[1])
    run = jit_begin if is_known(loop.logprobs) else _traced_begin
    speculation = run(proposer, own, tokens, lengths, loop.tokens)
    state = dataclasses.replace(loop.state, speculation=speculation)
    return dataclasses.replace(loop, state=state)


def speculative_program(model: Decoder, loop: Loop, proposer: Proposer) -> Callable[..., Loop]:
    """The jitted `speculation.steps.decode`, called like the result of `decode_program`.

    loop: as `begin_speculation` returns it.
    """
    if not is_known(loop.logprobs):
        return functools.partial(_traced_speculate, proposer)
    rows = len(loop.tokens)
    in_turn = any(has_warpgroups(model, n) for n in (rows, rows * (proposer.k + 1)))
    return functools.partial(jit_speculate_in_turn if in_turn else jit_speculate, proposer)


def has_warpgroups(model: Decoder, batch: int) -> bool:
    """Whether a product in a step of `batch` rows, experts included, runs on warpgroups."""
    of_experts = (
        layer.mlp.runs_by_warpgroups(batch)
        for layer in _share(model).layers
        if isinstance(layer.mlp, Experts)
    )
    return any(of_experts) or any(map(runs_by_warpgroups, _problems(model, batch)))


def _share(model: Decoder) -> Decoder:
    """The shapes of one device's share of the model."""
    return model.share_shapes() if isinstance(model, ShardedDecoder) else model


def _problems(model: Decoder, batch: int) -> list[Problem]:
    """The distinct products of a step of `batch` rows, without experts."""
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
    sampling: Samplings = None,
    kv_format: KVFormat | str | None = None,
    speculate: Proposer | str | None = None,
    adapters: Any = None,
    processors: Sequence[Processor] = (),
    constraint: Automaton | None = None,
    capture: Capture = MappingProxyType({}),
    steer: Steer | Sequence[Steer] = (),
) -> GeneratedTokens:
    """Continues a batch of prompts, as a pure function of arrays.

    Works under `jit` with `max_new_tokens` and `kv_format` static.

    tokens: int [batch, tokens], prompts padded on the right to one length.
    lengths: int [batch], tokens of each prompt.
    seeds: one for each row: integers [batch], or JAX keys of threefry2x32 (typed [batch], or raw
        uint32 [batch, 2]); 0 … batch − 1 by default. A row's draws depend on its seed alone. Greedy
        decoding uses none.
    max_new_tokens: the most new tokens of each row.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}, or a list with one for each
        row; greedy by default: `lm.sampling` isn't used here. Without stop_ids, rows end at the
        stop ids of the model's configuration (eos_token_id in config.json). `generate` instead ends
        them at `lm.tokenizer.stop_ids`, which come from generation_config.json and eos_token: pass
        these as stop_ids for the same ends.
    kv_format: the KV format of the cache, such as `KV8`; by default KV16, or in deterministic mode
        the mode's. The cache is created here, with pages of 128 tokens, and dropped at the end.
    speculate: an Ngram, a Draft or "mtp" for speculative decoding; see `generate`.
    adapters: int [batch], the adapter index of each row: `lm.adapters[name].place`, or 0 for none.
        `model` must then be `lm.adapted`. None: no row has an adapter.
    processors: logits processors of all rows, applied in order after those of the sampling.
    constraint: restricts all rows, by tables on the device: `Automaton.of(lm, mpjax.Regex(...))`. A
        text can end only with one of the model's stop ids, which should be the sampling's.
    capture, steer: activations of layers to return, and to change, as for `model.inspect`; not in a
        draft model.

    A row's output does not depend on its neighbours, except for rounding: kernels choose their
    tiles, and so the order of sums, by the size of the batch, unless the model is deterministic.

    Raises ValueError for invalid shapes, dtypes and limits. Outside `jit` it also raises for an
    empty prompt, a token id outside the vocabulary, and more tokens than the model has positions.
    """
    prompts = tokens, lengths = _read_prompts(model, tokens, lengths)
    batch, padded = tokens.shape
    samplings, proposer = read_samplings(sampling, batch), read_speculate(speculate)
    own = controls(samplings, batch, model.config.vocab_size, model.columns)
    for one in samplings:
        max_new_tokens = most_new_tokens(max_new_tokens, one.min_new_tokens)
    rules = read_rows_rules(samplings, padded + max_new_tokens)
    shared = (*rules, *read_constraint(constraint), *read_processors(processors))
    _require_positions(model, lengths, max_new_tokens)
    if proposer is not None:
        longest = int(np.max(lengths)) if is_known(lengths) else padded
        proposer.require(None, longest + max_new_tokens - 1)
        proposer.require_model(model.config)
    settings = RowSettings.of(
        samplings,
        batch,
        max_new_tokens=max_new_tokens,
        stop_ids=model.config.stop_ids,
        seeds=seeds,
        vocabulary=model.config.vocab_size,
    )
    if kv_format is None:
        kv_format = model.deterministic or KVFormat()
    cache = model.create_cache(batch, padded + max_new_tokens, kv_format)
    if adapters is not None:
        places = jnp.array(read_numbers(model, adapters, batch))  # copy: the cache is donated
        cache = dataclasses.replace(cache, adapters=places)
    cache = model.watch(cache, padded + max_new_tokens - 1, capture=capture, steer=steer)
    attached = [attach(one, batch, model.columns, shared=False) for one in own]
    attached += [attach(one, batch, model.columns, shared=True) for one in shared]
    arguments = (model, *prompts, cache, settings)
    run_prefill = jit_prefill if is_known((arguments, attached)) else _traced_prefill
    # Copy: the loop is donated, and an output array may share the buffer of its input.
    loop = run_prefill(*arguments, max_new_tokens, tuple(jax.tree.map(jnp.array, attached)))
    return collect(_generate(model, prompts, loop, proposer))


def _generate(
    model: Decoder,
    prompts: tuple[jax.Array, jax.Array],
    loop: Loop,
    speculate: Proposer | None,
) -> Loop:
    """Decodes all tokens after prefill; the arguments are checked."""
    columns = loop.tokens.shape[1]
    if speculate is None:
        run = decode_program(model, loop)
    else:
        loop = begin_speculation(speculate, loop, *prompts)
        run = speculative_program(model, loop, speculate)
    return run(model, loop, jnp.int32(columns))


def _require_positions(model: Decoder, lengths: jax.Array, max_new_tokens: int) -> None:
    """Raises ValueError if a row would exceed the model's positions; traced lengths pass."""
    positions = model.config.max_position_embeddings
    if not are_between(lengths, 1, positions + 1 - max_new_tokens):  # none for the last token
        raise ValueError(
            f"lengths are {lengths.tolist()}, and {max_new_tokens} new tokens would pass the "
            f"{positions} positions of this model: shorten the prompts, ask for fewer, or load the "
            "model with max_positions"
        )


def _read_prompts(model: Decoder, tokens: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Checked prompts as arrays. Raises ValueError as `generate_tokens` says."""
    require_type("model", model, Decoder, hint=", such as lm.model")
    tokens, lengths = as_arrays("generate_tokens", tokens=tokens, lengths=lengths)
    if tokens.ndim != 2 or not len(tokens):
        raise ValueError(
            f"tokens have shape {tokens.shape}: expected [batch, tokens] of one prompt or more"
        )
    batch, padded = tokens.shape
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths have shape {lengths.shape}: expected ({batch},), as tokens are {tokens.shape}"
        )
    for name, array in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} are {array.dtype}: expected integers")
    vocabulary = model.config.vocab_size
    if not are_between(tokens, 0, vocabulary - 1):
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, the model's vocabulary")
    if not are_between(lengths, 1, padded):
        raise ValueError(f"lengths are {lengths.tolist()}: expected each from 1 to {padded}")
    return tokens, lengths.astype(jnp.int32)


def collect(loop: Loop) -> GeneratedTokens:
    """The new tokens of a loop so far."""
    state = loop.state
    stopped = state.settings.stops(state.newest[:, None])[:, 0] & (state.counts > 0)
    finite = ~jnp.isnan(loop.logprobs).any(-1)
    speculated = None if state.speculation is None else state.speculation.done
    found = loop.tokens, state.counts, loop.logprobs, stopped, finite, speculated
    lengths = state.cache.lengths[:, None, None]

    def only_read(values: jax.Array) -> jax.Array:
        """Captures [batch, positions, ...] without those of rejected tokens after a row's end."""
        return jnp.where(jnp.arange(values.shape[1])[None, :, None] < lengths, values, 0)

    return GeneratedTokens(*found, jax.tree.map(only_read, state.cache.captured))
