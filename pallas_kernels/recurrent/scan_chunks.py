"""Mamba2's scan for prefill as a Triton kernel, on tensor cores.

A program goes from chunk to chunk of a sequence, with the states of some channels of a head in
registers. x, b and c stay in bfloat16, as they are passed, and all products are as exact as in
float32 (`products`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.recurrent.products import dot_parts, in_parts
from mpjax.kernels.target import current_target

LEAST, MOST = 16, 64  # tokens of a chunk
PART = 32  # channels of a head per program
WARPS = 4
MOST_STATES = 128  # of a channel: more would not fit the registers and the shared memory


class ScanTokens(NamedTuple):
    """The scan's inputs of tokens [tokens]; inside the kernel, references.

    x: [tokens, heads, channels]. steps: float32 [tokens, heads]. rates: float32 [heads]. b, c:
    [tokens, groups, states].
    """

    x: Any
    steps: Any
    rates: Any
    b: Any
    c: Any


def why_not(x: jax.Array, b: jax.Array, c: jax.Array) -> str | None:
    """The reason why the kernel can't process these tokens, or None if it can."""
    if {x.dtype, b.dtype, c.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"x, b and c are {x.dtype}, {b.dtype} and {c.dtype}, and the kernel needs bfloat16"
    sizes = x.shape[-1], b.shape[-1]
    are_powers = all(size >= LEAST and not size & size - 1 for size in sizes)
    if not are_powers or sizes[1] > MOST_STATES:
        return (
            f"heads have {sizes[0]} channels of {sizes[1]} states, and the kernel needs powers of "
            f"two from {LEAST}, and {MOST_STATES} states at most"
        )
    return None


def read(
    tokens: ScanTokens,
    state: jax.Array,
    begins: jax.Array,
    counts: jax.Array,
    *,
    longest: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs float32 [tokens, heads, channels], and the states [sequences, heads, ...].

    begins, counts: int32 [sequences], the first token of each sequence, and the number of its
    tokens.
    longest: the most tokens of a sequence. Outputs of other tokens are not written.
    """
    size = max(LEAST, min(MOST, pl.next_power_of_2(longest)))
    _, heads, width = tokens.x.shape
    shapes = (
        jax.ShapeDtypeStruct(tokens.x.shape, jnp.float32),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    found: tuple[jax.Array, jax.Array] = launch(
        functools.partial(_advance, size=size),
        tokens,
        (begins, counts),
        state,
        out_shape=shapes,
        grid=(heads * (width // min(PART, width)), len(counts)),
        settings=Settings("state_space_chunks", warps=WARPS),
        interpret=interpret,
    )
    return found


def _advance(
    tokens: ScanTokens,
    places: tuple[Any, Any],
    before: Any,
    outputs: Any,
    after: Any,
    *,
    size: int,
) -> None:
    """Advances the states of some channels of a head by the chunks of a sequence."""
    program, sequence = first_program_id(), pl.program_id(1)
    heads, width, states = before.shape[1:]
    part = min(PART, width)
    parts, own = width // part, jnp.arange(size)
    head, channels = program // parts, (program % parts * part + jnp.arange(part))[None, :]
    begin, count = (load(ref.at[sequence]) for ref in places)
    group, n = head // (heads // tokens.b.shape[1]), jnp.arange(states)
    rate = load(tokens.rates.at[head + jnp.arange(1)]).astype(jnp.float32)
    where = sequence, head, channels, n[:, None]  # [states, channels]
    rows, columns = own[:, None], own[None, :]

    def step(number: jax.Array, state: jax.Array) -> jax.Array:
        is_real = own < count - number * size
        token = begin + number * size + own
        b, c = (
            load_masked(ref.at[token[:, None], group, n[None, :]], is_real)
            for ref in (tokens.b, tokens.c)
        )
        target = token[:, None], head, channels
        x = load_masked(tokens.x.at[target], is_real)
        steps = load_masked(tokens.steps.at[token, head], is_real)
        logs = steps * rate
        # Log-decays between two tokens are summed directly: a difference would lose small ones.
        later = jnp.where(rows > columns, logs[:, None], 0.0)
        decays = jnp.where(rows >= columns, jnp.exp(jnp.cumsum(later, axis=0)), 0.0)
        since, left = jnp.exp(jnp.cumsum(logs)), jnp.exp(later.sum(0))
        weights = current_target().dot(c, b.T) * decays * steps[None, :]
        y = since[:, None] * dot_parts(c, in_parts(state)) + dot_parts(in_parts(weights), x)
        store(outputs.at[target], y, mask=jnp.broadcast_to(is_real[:, None], (size, part)))
        added = (left * steps)[:, None] * x.astype(jnp.float32)
        return jnp.exp(logs.sum()) * state + dot_parts(b.T, in_parts(added))

    state = jax.lax.fori_loop(0, pl.cdiv(count, size), step, load(before.at[where]))
    store(after.at[where], state)
