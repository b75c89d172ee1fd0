"""The carry of the generation loop, the conditions that end it, and the loop around its steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import PagedKVCache, device

STRIDE = 8  # decoding steps between two checks whether all rows are finished, on a GPU
STOP_IDS = 8  # the number of stop ids is rounded up to a multiple


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stop_ids", "maximum"],
    meta_fields=["room"],
)
@dataclasses.dataclass(frozen=True)
class Limits:
    """Conditions that end a row.

    stop_ids: int32 [any number], tokens that end a row. maximum: int32 [batch], the most new tokens
    of each row. room: columns for new tokens in a DecodingState (static).
    """

    stop_ids: jax.Array
    maximum: jax.Array
    room: int

    @classmethod
    def of(cls, batch: int, stop_ids: Any, maximum: Any, room: int) -> Limits:
        """Limits of a batch. maximum: a number for all rows, or an array [batch]."""
        ids = jnp.asarray(stop_ids, jnp.int32)
        # The padding is an id that no vocabulary has. With it, few sizes of stop_ids are compiled.
        padding = (0, -len(ids) % STOP_IDS)
        return cls(
            jnp.pad(ids, padding, constant_values=jnp.iinfo(jnp.int32).max),
            jnp.full(batch, maximum, jnp.int32),
            room,
        )

    def stops(self, tokens: jax.Array) -> jax.Array:
        """Whether each token ends a row, bool of the tokens' shape."""
        if len(self.stop_ids) > 2 * STOP_IDS:
            return jnp.isin(tokens, self.stop_ids)
        # XLA fuses comparisons, but not a reduction, with what reads the result.
        found = jnp.zeros(tokens.shape, bool)
        for number in range(len(self.stop_ids)):
            found |= tokens == self.stop_ids[number]
        return found


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
        "speculation",
        "candidates",
        "prompts",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """The carry of the generation loop.

    cache: keys and values of all tokens but each row's newest.
    keys: typed PRNG keys [batch], one for each row.
    tokens, logprobs: new tokens int32 and their log-probabilities float32 [batch, room].
    counts: int32 [batch], number of new tokens of each row. finished: bool [batch].
    seen: bool [batch, vocabulary], whether a token is in the prompt or among the new tokens; None
        without repetition penalty.
    step: int32 scalar, number of new tokens of the longest row.
    speculation: a Speculation, which `speculation/loop.py` adds; None without one.
    candidates: the likeliest tokens beside each new one, int32, and their log-probabilities,
        float32, [batch, room, number] both; None if they are not asked for.
    prompts: int32 [batch, tokens], padded on the right, where rows may have to be read again; None
        where none has.
    """

    cache: PagedKVCache
    keys: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    finished: jax.Array
    seen: jax.Array | None
    step: jax.Array
    speculation: Any = None
    candidates: Any = None
    prompts: jax.Array | None = None

    def text(self, row: jax.Array) -> jax.Array:
        """The prompt of a row (int32 scalar) and its new tokens behind it, and padding."""
        assert self.prompts is not None
        text = jnp.pad(self.prompts[row], (0, self.tokens.shape[1]))
        prompt = self.cache.lengths[row] + 1 - self.counts[row]
        return jax.lax.dynamic_update_slice_in_dim(text, self.tokens[row], prompt, axis=0)


def repeat(
    advance: Callable[[DecodingState], DecodingState],
    unfinished: Callable[[DecodingState], jax.Array],
    state: DecodingState,
    stride: int | None,
) -> DecodingState:
    """Repeats decoding steps while the state is unfinished, in one `while_loop`.

    advance: a step, which changes nothing in a state that is not unfinished.
    unfinished: says whether to go on, as a bool scalar.
    stride: steps between two checks whether to go on (static); by default STRIDE on a GPU, where
        the host makes the check and the GPU waits for it, and 1 elsewhere.
    """
    stride = stride or (STRIDE if device.on_gpu() else 1)
    return jax.lax.while_loop(unfinished, functools.partial(several, advance, stride), state)


def several(
    advance: Callable[[DecodingState], DecodingState], stride: int, state: DecodingState
) -> DecodingState:
    """The state after `stride` steps, which the host launches without waiting for the GPU."""
    # XLA launches all steps of a loop of known length at once.
    if stride == 1:
        return advance(state)
    return jax.lax.fori_loop(0, stride, lambda _, state: advance(state), state)
