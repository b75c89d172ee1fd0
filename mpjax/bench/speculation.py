"""The time of a step that verifies proposed tokens, against a step of plain decoding.

With random weights no proposed token would be accepted, and the share that is depends on the text.
What can be measured is the cost of a step; the speed-up is the tokens per step over that cost.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.bench import measure
from mpjax.decoding import speculative_program
from mpjax.decoding_state import DecodingState, Limits
from mpjax.greedy import likeliest
from mpjax.kernels import PagedKVCache
from mpjax.models import Decoder
from mpjax.sampling import Sampling
from mpjax.speculation import loop
from mpjax.speculation.ngram import Ngram
from mpjax.speculation.proposer import Context, Proposal

ROUNDS = 4  # the first of which compiles, and is not counted
HEADERS = ("precision", "batch", "context", "k", "step", "proposing none", "verifying k")
Act = Callable[[Callable[[DecodingState], DecodingState]], None]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["k", "n", "proposes"]
)
@dataclasses.dataclass(frozen=True)
class Forced(Ngram):
    """Looks n-grams up, and then proposes k tokens in each step, or none.

    proposes: which of the two.
    """

    proposes: bool = True

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """The tokens that Ngram finds; any tokens if it finds none."""
        proposal, own = super().propose(context)
        counts = context.most if self.proposes else jnp.zeros_like(context.most)
        return dataclasses.replace(proposal, counts=counts), own


def step_costs(
    model: Decoder, tokens: jax.Array, limits: Limits, k: int, act: Act
) -> dict[str, float]:
    """The times of a step in the speculative loop, in microseconds, that proposes tokens or none.

    tokens: int32 [batch, tokens], the prompts. k: tokens that are proposed to each row.
    act: calls a function with the state after the prompts, and keeps the state that it returns.
    """
    found: dict[str, float] = {"k": k}
    for name, proposes in (("verifying", True), ("proposing", False)):
        seconds = functools.partial(_seconds, model, Forced(k, proposes=proposes), tokens, limits)
        times = [seconds(act) for _ in range(ROUNDS)]
        found[f"{name}_step_microseconds"] = statistics.median(times[1:]) * 1e6
    return found


def verifying_kernels(model: Decoder, state: DecodingState, k: int) -> dict[str, float]:
    """The time of each kernel in a step that reads k + 1 tokens of each row, in microseconds.

    state: its rows have room for them. Copies of the cache are in the times, as nothing is donated.
    """
    batch = len(state.tokens)
    tokens, counts = jnp.zeros((batch, k + 1), jnp.int32), jnp.full(batch, k + 1, jnp.int32)

    def step(model: Decoder, tokens: jax.Array, cache: PagedKVCache) -> jax.Array:
        logits, _ = model.step(tokens, counts, cache, every_position=True)
        return likeliest(logits.reshape(-1, logits.shape[-1]))[0]

    return measure.kernel_microseconds(step, model, tokens, state.cache, iterations=3)


def _seconds(
    model: Decoder, proposer: Forced, tokens: jax.Array, limits: Limits, act: Act
) -> float:
    """Seconds of a step, from those of a whole generation."""
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    measured = 0.0

    def generate(state: DecodingState) -> DecodingState:
        nonlocal measured
        state = jax.block_until_ready(loop.begin(proposer, state, tokens, lengths))
        run = speculative_program(model, state, proposer)
        begin = time.perf_counter()
        state = run(model, state, Sampling(), limits, jnp.int32(limits.room))
        steps = int(state.speculation.done.steps.max())  # waits for the device
        measured = (time.perf_counter() - begin) / steps
        return dataclasses.replace(state, speculation=None)

    act(generate)
    return measured


def rows(row: Mapping[str, Any]) -> list[list[str]]:
    """The texts of the table's rows for a case, in the order of HEADERS."""
    step = row["decode_step_microseconds"]
    return [
        [
            row["precision"],
            str(row["batch"]),
            str(row["prompt_tokens"]),
            str(costs["k"]),
            f"{step:.0f} µs",
            f"{costs['proposing_step_microseconds'] / step:.2f} ×",
            f"{costs['verifying_step_microseconds'] / step:.2f} ×",
        ]
        for costs in row.get("speculation", ())
    ]
