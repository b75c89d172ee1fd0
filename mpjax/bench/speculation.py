"""Measures a step that verifies proposed tokens, against a plain decoding step.

With random weights no proposed token would be accepted, and acceptance depends on the text. So the
cost of a step is measured; the speed-up is the tokens per step divided by that cost.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.bench import measure, tables
from mpjax.generation.decoding import begin_speculation, speculative_program
from mpjax.generation.loop import Loop
from mpjax.generation.speculation.heads import MTP, Eagle
from mpjax.generation.speculation.ngram import Ngram
from mpjax.generation.speculation.proposer import Context, Proposal, Proposer
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache
from mpjax.sampling.greedy import likeliest

ROUNDS = 4  # the first round compiles and is not counted
KINDS = {"verifying": True, "proposing": False}  # kind of step → whether tokens are proposed
HEAD = "drafting"  # the kind of step in which the model's head proposes k tokens
COLUMNS: tables.Columns = {
    "precision": "{precision}",
    "batch": "{batch}",
    "context": "{prompt_tokens}",
    "k": "{k}",
    "step": "{decode_step_microseconds:.0f} µs",
    "proposing none": "{proposing:.2f} ×",
    "verifying k": "{verifying:.2f} ×",
    "with the head": "{drafting:.2f} ×",
}


def rows(measured: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each case and number of proposed tokens, with times relative to a plain step."""
    for row in measured:
        step = row["decode_step_microseconds"]
        for costs in row.get("speculation", ()):
            names = (name for name in (*KINDS, HEAD) if f"{name}_step_microseconds" in costs)
            over = {name: costs[f"{name}_step_microseconds"] / step for name in names}
            yield {**row, "k": costs["k"], **over}


Act = Callable[[Callable[[Loop], Loop]], None]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["k", "n", "proposes"]
)
@dataclasses.dataclass(frozen=True)
class Forced(Ngram):
    """Looks up n-grams, then proposes exactly k tokens in each step, or none.

    proposes: whether it proposes k tokens.
    """

    proposes: bool = True

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """The tokens that Ngram finds, or arbitrary tokens if it finds none."""
        proposal, own = super().propose(context)
        counts = context.most if self.proposes else jnp.zeros_like(context.most)
        return dataclasses.replace(proposal, counts=counts), own


def step_costs(model: Decoder, tokens: jax.Array, k: int, act: Act) -> dict[str, float]:
    """The times of a speculative step, in microseconds: with k proposed tokens, and with none.

    tokens: int32 [batch, tokens], the prompts. k: tokens proposed to each row.
    act: calls a function with the loop after the prompts, and keeps the returned loop.
    """
    found: dict[str, float] = {"k": k}
    for name, proposes in KINDS.items():
        seconds = functools.partial(_seconds, model, Forced(k, proposes=proposes), tokens)
        times = [seconds(act) for _ in range(ROUNDS)]
        found[f"{name}_step_microseconds"] = statistics.median(times[1:]) * 1e6
    return found


def head_cost(headed: Decoder, tokens: jax.Array, k: int, act: Act) -> dict[str, float]:
    """The time of a step in which the model's own head proposes k tokens, in microseconds.

    headed: the model with its head, whose layer is added to the cache for the measurement. The
    other arguments are those of `step_costs`.
    """
    state = jax.jit(functools.partial(_head_state, headed))

    def act_with_head(generate: Callable[[Loop], Loop]) -> None:
        def run(loop: Loop) -> Loop:
            layers = loop.state.cache.layers
            end = generate(_with_layers(loop, (*layers, state(loop.state.cache))))
            return _with_layers(end, end.state.cache.layers[:-1])

        act(run)

    last = headed.config.layers[-1].attention
    head = Eagle(k) if last and last.kind == Eagle.layer else MTP(k)
    times = [_seconds(headed, head, tokens, act_with_head) for _ in range(ROUNDS)]
    return {f"{HEAD}_step_microseconds": statistics.median(times[1:]) * 1e6}


def _head_state(headed: Decoder, cache: DecoderCache) -> Any:
    """An empty state of the head's layer, beside a cache of the other layers."""
    pages = [table.size for table in cache.tables]
    return headed.create_states(pages, len(cache.lengths), cache.format, cache.page_size)[-1]


def _with_layers(loop: Loop, layers: tuple[Any, ...]) -> Loop:
    cache = dataclasses.replace(loop.state.cache, layers=layers)
    return dataclasses.replace(loop, state=dataclasses.replace(loop.state, cache=cache))


def verifying_kernels(model: Decoder, cache: DecoderCache, k: int) -> dict[str, float]:
    """The time of each kernel in a verifying step of k + 1 tokens per row, in microseconds.

    cache: with room for these tokens. Times include copies of the cache, since nothing is donated.
    """
    batch = len(cache.lengths)
    tokens, counts = jnp.zeros((batch, k + 1), jnp.int32), jnp.full(batch, k + 1, jnp.int32)

    def step(model: Decoder, tokens: jax.Array, cache: DecoderCache) -> jax.Array:
        logits, _ = model.step(tokens, counts, cache, every_position=True)
        return likeliest(logits.reshape(-1, logits.shape[-1]))[0]

    return measure.kernel_microseconds(step, model, tokens, cache, iterations=3)


def _seconds(model: Decoder, proposer: Proposer, tokens: jax.Array, act: Act) -> float:
    """The mean seconds of a step in a whole generation."""
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    measured = 0.0

    def generate(loop: Loop) -> Loop:
        nonlocal measured
        loop = jax.block_until_ready(begin_speculation(proposer, loop, tokens, lengths))
        run = speculative_program(model, loop, proposer)
        begin = time.perf_counter()
        loop = run(model, loop, jnp.int32(loop.tokens.shape[1]))
        steps = int(loop.state.speculation.done.steps.max())  # waits for the device
        measured = (time.perf_counter() - begin) / steps
        state = dataclasses.replace(loop.state, speculation=None)
        return dataclasses.replace(loop, state=state)

    act(generate)
    return measured
