"""Loops on the device that repeat decoding steps and collect the new tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.proposer import put
from mpjax.generation.state import State
from mpjax.generation.step import StepTokens, newest, step
from mpjax.kernels import device
from mpjax.models import Decoder
from mpjax.models.rereading import read_again
from mpjax.sampling.draw import no_top_logprobs

STRIDE = 8  # decoding steps on a GPU between two checks whether all rows have ended


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "before", "tokens", "logprobs", "top_logprobs", "prompts"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Loop:
    """The carry of a decoding loop: a state, and the rows' new tokens.

    before: int32 [rows], the number of each row's new tokens before the loop.
    tokens, logprobs: int32 and float32 [rows, columns], the new tokens of the loop, then zeros.
    top_logprobs: ids and log-probabilities [rows, columns, number]; None if no row wants them.
    prompts: int32 [rows, tokens], padded on the right, if rows may have to be prefilled again;
        otherwise None.
    """

    state: State
    before: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    top_logprobs: Any = None
    prompts: jax.Array | None = None

    @classmethod
    def begin(
        cls, state: State, columns: int, vocabulary: int, prompts: jax.Array | None = None
    ) -> Loop:
        """A loop before its first step. vocabulary: the number of columns of the logits."""
        shape = len(state.counts), columns
        wants_top = state.settings.top_logprobs is not None
        return cls(
            state,
            state.counts,
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            no_top_logprobs(shape, vocabulary) if wants_top else None,
            prompts,
        )

    @property
    def drawn(self) -> jax.Array:
        """The number of each row's new tokens in this loop, int32 [rows]."""
        return self.state.counts - self.before

    def goes_on(self, until: Any) -> jax.Array:
        """Whether each row runs and has fewer than `until` new tokens, bool [rows]."""
        return self.state.running & (self.drawn < until)

    def advance(self, model: Decoder, goes_on: jax.Array) -> Loop:
        """The loop after a plain decoding step of the rows in `goes_on`, bool [rows]."""
        loop = self.reread(model, goes_on)
        state = loop.state
        return loop.record(*step(model, state, newest(model, state, goes_on), goes_on))

    def record(self, state: State, drawn: StepTokens) -> Loop:
        """The loop after a step: with its state, and its drawn tokens appended."""

        def record(target: jax.Array, new: jax.Array) -> jax.Array:
            return put(target, new, self.drawn, drawn.counts)

        tokens, logprobs, top_logprobs = drawn.draw
        return dataclasses.replace(
            self,
            state=state,
            tokens=record(self.tokens, tokens),
            logprobs=record(self.logprobs, logprobs),
            top_logprobs=jax.tree.map(record, self.top_logprobs, top_logprobs),
        )

    def reread(self, model: Decoder, goes_on: jax.Array) -> Loop:
        """The loop after prefilling again the rows whose next token needs it; see `read_again`.

        goes_on: bool [rows], the rows that get a token.
        """
        if self.prompts is None:
            return self
        cache = read_again(model, self.state.cache, goes_on.astype(jnp.int32), self._text)
        return dataclasses.replace(self, state=dataclasses.replace(self.state, cache=cache))

    def _text(self, row: jax.Array) -> jax.Array:
        """The prompt of a row (int32 scalar), its new tokens, then padding."""
        assert self.prompts is not None
        text = jnp.pad(self.prompts[row], (0, self.tokens.shape[1]))
        prompt = self.state.cache.lengths[row] + 1 - self.drawn[row]
        return jax.lax.dynamic_update_slice_in_dim(text, self.tokens[row], prompt, axis=0)


def repeat(
    advance: Callable[[Loop], Loop],
    unfinished: Callable[[Loop], jax.Array],
    loop: Loop,
    stride: int | None,
) -> Loop:
    """Repeats decoding steps while the loop is unfinished, in one `while_loop`.

    advance: one step, which must not change a finished loop.
    unfinished: the loop's condition, a bool scalar.
    stride: steps between two checks of the condition (static); by default STRIDE on a GPU, which
        waits for the host at each check, and 1 elsewhere.
    """
    stride = stride or (STRIDE if device.on_gpu() else 1)
    return jax.lax.while_loop(unfinished, functools.partial(several, advance, stride), loop)


def several(advance: Callable[[Loop], Loop], stride: int, loop: Loop) -> Loop:
    """The loop after `stride` steps, which the host launches without waiting for the GPU."""
    # XLA launches all steps of a loop of known length without waiting.
    if stride == 1:
        return advance(loop)
    return jax.lax.fori_loop(0, stride, lambda _, loop: advance(loop), loop)
