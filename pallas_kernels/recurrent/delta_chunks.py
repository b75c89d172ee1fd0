"""The gated delta rule for prefill as Triton kernels, on tensor cores.

Two kernels process chunks of tokens. The first solves each chunk's triangular system, for all
chunks at the same time: the rest of a chunk's update is one product with the state before it. The
second goes from chunk to chunk with the state in registers; each of its programs has some values of
a head.

All products are as exact as in float32. Queries and keys stay in bfloat16, as they are passed:
products of the two are exact, and products with a state split it into three bfloat16 parts. Their
norms are factors of the results. Products of two float32 tiles take three tf32 products. Source:
Yang et al., Parallelizing Linear Transformers with the Delta Rule (arXiv 2406.06484).

Decays of key channels are factors inside the products over channels. These products are then sums
without tensor cores, over pairs of a chunk's tokens: no factor exceeds 1, whatever the decays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.recurrent.delta_inputs import EPSILON, DeltaInputs
from mpjax.kernels.recurrent.products import dot_parts, in_parts
from mpjax.kernels.target import current_target

LEAST, MOST = 16, 64  # tokens of a chunk
PART = 32  # values of a head that a program has
OF_CHANNELS = 16  # tokens of a chunk, and channels at a time, with decays of key channels
WARPS = 4
MOST_CHANNELS = 128  # of keys: more would not fit the registers and the shared memory


class Chunks(NamedTuple):
    """The chunks of sequences whose tokens are concatenated in arrays.

    begins, counts: int32 [sequences], the first token of each sequence, and the number of its
    tokens.
    firsts: int32 [sequences], the first chunk of each sequence.
    chunk_begins, chunk_counts: int32 [chunks], as begins and counts, for each chunk; unused chunks
        have 0 tokens.
    """

    begins: Any
    counts: Any
    firsts: Any
    chunk_begins: Any
    chunk_counts: Any

    @classmethod
    def of(cls, begins: jax.Array, counts: jax.Array, size: int, most: int) -> Chunks:
        """The chunks of `size` tokens of all sequences, at most `most` chunks."""
        needed = -(-counts // size)
        found = tokens_of(needed, most)
        passed = found.number * size
        own = jnp.clip(counts[found.sequence] - passed, 0, size)
        own = jnp.where(found.is_real, own, 0).astype(jnp.int32)
        chunk_begins = (begins[found.sequence] + passed).astype(jnp.int32)
        firsts = (jnp.cumsum(needed) - needed).astype(jnp.int32)
        return cls(begins, counts, firsts, chunk_begins, own)


class _Solved(NamedTuple):
    """The parts of a chunk's update that don't depend on the state; inside kernels, references.

    inverse: float32 [chunks, value heads, tokens, tokens], the map from the differences between
        values and the state's values for keys to the written updates. asked: of the same shape, the
        map from written updates to outputs.
    factors: float32 [chunks, value heads, 4, tokens], of the products of the state with keys and
        with queries, of keys with the written updates, and (all equal) of the state. With decays of
        channels: float32 [chunks, value heads, 3, tokens, K], keys and queries times the decays up
        to a token, and keys times the decays after it.
    kept: with decays of channels, float32 [chunks, value heads, K], the factors of the state.
    """

    inverse: Any
    asked: Any
    factors: Any
    kept: Any = None


def why_not(inputs: DeltaInputs) -> str | None:
    """The reason why the kernels can't process these inputs, or None if they can."""
    if inputs.query.dtype != jnp.bfloat16 or inputs.key.dtype != jnp.bfloat16:
        return (
            f"query and key are {inputs.query.dtype} and {inputs.key.dtype}, and the kernels need "
            "bfloat16"
        )
    if (channels := inputs.key.shape[-1]) > MOST_CHANNELS:
        return f"keys have {channels} channels, and the kernels read {MOST_CHANNELS} at most"
    return None


def padded_sizes(inputs: DeltaInputs) -> tuple[int, int]:
    """The sizes of keys and of values, padded to powers of two, which the kernels need."""
    sizes = inputs.key.shape[-1], inputs.value.shape[-1]
    keys, values = (max(LEAST, pl.next_power_of_2(size)) for size in sizes)
    return keys, values


def read(
    inputs: DeltaInputs,
    state: jax.Array,
    begins: jax.Array,
    counts: jax.Array,
    *,
    longest: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs float32 [tokens, value heads, V], and the states [sequences, value heads, K, V].

    inputs: of tokens [tokens], a sequence's tokens one after another. begins, counts: int32
    [sequences]. longest: the most tokens of a sequence. Outputs of other tokens are not written.
    """
    size = max(LEAST, min(MOST, pl.next_power_of_2(longest)))
    size = OF_CHANNELS if inputs.decays_by_channel else size
    tokens, heads, width = inputs.value.shape
    most = min(tokens // size + len(counts), len(counts) * pl.cdiv(longest, size))
    chunks = Chunks.of(begins, counts, size, most)
    channels = inputs.key.shape[2]
    sizes: tuple[tuple[int, ...], ...] = (size, size), (size, size), (4, size)
    if inputs.decays_by_channel:
        sizes = *sizes[:2], (3, size, channels), (channels,)
    solved = launch(
        functools.partial(_solve_by_channel if inputs.decays_by_channel else _solve, size=size),
        inputs,
        chunks,
        out_shape=tuple(jax.ShapeDtypeStruct((most, heads, *x), jnp.float32) for x in sizes),
        grid=(heads, most),
        settings=Settings("gated_delta_solve", warps=WARPS),
        interpret=interpret,
    )
    shapes = (
        jax.ShapeDtypeStruct((tokens, heads, width), jnp.float32),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    found: tuple[jax.Array, jax.Array] = launch(
        functools.partial(_advance, size=size),
        inputs,
        chunks,
        _Solved(*solved),
        state,
        out_shape=shapes,
        grid=(heads * (width // min(PART, width)), len(counts)),
        settings=Settings("gated_delta_chunks", warps=WARPS),
        interpret=interpret,
    )
    return found


def _solve(inputs: DeltaInputs, chunks: Chunks, *references: Any, size: int) -> None:
    """Computes and stores `_Solved` of a chunk and a head."""
    head, chunk, solved = first_program_id(), pl.program_id(1), _Solved(*references)
    begin, count = load(chunks.chunk_begins.at[chunk]), load(chunks.chunk_counts.at[chunk])
    own = jnp.arange(size)
    (query, asking), (key, known) = _keys(inputs, head, begin + own, own < count)
    decay, rate = _gates(inputs, head, begin + own, own < count)
    rows, columns = own[:, None], own[None, :]
    after = jnp.where(rows > columns, decay[:, None], 0.0)
    # Log-decays between two tokens are summed directly: see `delta_reference`.
    between = jnp.cumsum(after, axis=0)
    begun, left = jnp.exp(jnp.cumsum(decay)), jnp.exp(after.sum(0))
    total = jnp.broadcast_to(jnp.exp(decay.sum()), (size,))
    for number, vector in enumerate((begun * known, begun * asking, left * known, total)):
        store(solved.factors.at[chunk, head, jnp.int32(number), own], vector)
    factors = jnp.where(rows >= columns, jnp.exp(between), 0.0)
    factors *= known[None, :]
    products = (rate * known)[:, None] * current_target().dot(key, key.T)
    where = chunk, head, rows, columns
    store(solved.inverse.at[where], _inverse(products * factors, own) * rate[None, :])
    asked = asking[:, None] * current_target().dot(query, key.T)
    store(solved.asked.at[where], asked * factors)


def _inverse(products: jax.Array, own: jax.Array) -> jax.Array:
    """The inverse of I + A, with the strictly lower part A of rate · (K Kᵀ) ⊙ Γ.

    It is built from the inverses of diagonal blocks: the block A' below two of them becomes
    −second · A' · first. products: [tokens, tokens]. own: the numbers of the tokens.
    """
    rows, columns = own[:, None], own[None, :]
    lower = jnp.where(rows > columns, products, 0.0)
    found = jnp.where(rows == columns, 1.0, 0.0)
    block = 1
    while block < len(own):
        is_below = (rows // block == columns // block + 1) & (rows // block % 2 == 1)
        below = jnp.where(is_below, lower, 0.0)
        found -= below if block == 1 else _dot(_dot(found, below), found)
        block *= 2
    return found


def _solve_by_channel(inputs: DeltaInputs, chunks: Chunks, *references: Any, size: int) -> None:
    """`_solve` with decays of key channels: some channels at a time."""
    head, chunk, solved = first_program_id(), pl.program_id(1), _Solved(*references)
    begin, count = load(chunks.chunk_begins.at[chunk]), load(chunks.chunk_counts.at[chunk])
    own = jnp.arange(size)
    token, is_real = begin + own, own < count
    (_, asking), (_, known) = _keys(inputs, head, token, is_real)
    rate = load(inputs.rate.at[token, head], mask=is_real, other=0).astype(jnp.float32)
    group = head // (inputs.value.shape[1] // inputs.key.shape[1])
    part = min(OF_CHANNELS, inputs.key.shape[2])
    later, earlier = own[:, None, None], own[None, :, None]

    def add(number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        channel = (number * part + jnp.arange(part))[None, :]
        query, key, decay = (
            load_masked(ref.at[token[:, None], which, channel], is_real).astype(jnp.float32)
            for ref, which in ((inputs.query, group), (inputs.key, group), (inputs.decay, head))
        )
        query, key = query * asking[:, None], key * known[:, None]
        # Log-decays between two tokens are summed directly: see `delta_reference`.
        after = jnp.cumsum(jnp.where(later > earlier, decay[:, None, :], 0.0), axis=0)
        between = jnp.where(later >= earlier, jnp.exp(after), 0.0)
        left = jnp.where(later == size - 1, between, 0.0).sum(0)
        begun = jnp.exp(jnp.cumsum(decay, axis=0))
        for which, tile in enumerate((key * begun, query * begun, key * left)):
            store(solved.factors.at[chunk, head, jnp.int32(which), own[:, None], channel], tile)
        kept = jnp.where((own == size - 1)[:, None], begun, 0.0).sum(0)
        store(solved.kept.at[chunk, head, number * part + jnp.arange(part)], kept)
        known_by = between * key[None, :, :]
        products, asked = sums
        products += (key[:, None, :] * known_by).sum(2)
        return products, asked + (query[:, None, :] * known_by).sum(2)

    zeros = jnp.zeros((size, size), jnp.float32)
    parts = inputs.key.shape[2] // part
    products, asked = jax.lax.fori_loop(0, parts, add, (zeros, zeros))
    where = chunk, head, own[:, None], own[None, :]
    found = _inverse(rate[:, None] * products, own)
    store(solved.inverse.at[where], found * rate[None, :])
    store(solved.asked.at[where], asked)


def _advance(
    inputs: DeltaInputs,
    chunks: Chunks,
    solved: _Solved,
    before: Any,
    outputs: Any,
    after: Any,
    *,
    size: int,
) -> None:
    """Advances some values of a head's state by the chunks of a sequence."""
    program, sequence = first_program_id(), pl.program_id(1)
    heads, channels, width = before.shape[1:]
    part = min(PART, width)
    head, values = (
        program // (width // part),
        program % (width // part) * part + jnp.arange(part),
    )
    group = head // (heads // inputs.key.shape[1])
    keys, channel = (inputs.query, inputs.key), jnp.arange(channels)[None, :]
    begin, count = load(chunks.begins.at[sequence]), load(chunks.counts.at[sequence])
    first, own = load(chunks.firsts.at[sequence]), jnp.arange(size)
    where = sequence, head, jnp.arange(channels)[:, None], values[None, :]

    def step(number: jax.Array, state: jax.Array) -> jax.Array:
        passed = number * size
        is_real = own < count - passed
        token = begin + passed + own
        chunk = first + number
        tile = chunk, head, own[:, None], own[None, :]
        target = token[:, None], head, values[None, :]
        value = load_masked(inputs.value.at[target], is_real).astype(jnp.float32)
        inverse = load(solved.inverse.at[tile])
        if solved.kept is not None:
            of_keys, of_queries, left = (
                load(solved.factors.at[chunk, head, jnp.int32(which), own[:, None], channel])
                for which in range(3)
            )
            known, asked = _dot(of_keys, state), _dot(of_queries, state)
            written = _dot(inverse, value - known)
            kept = load(solved.kept.at[chunk, head, jnp.arange(channels)])[:, None]
            gained = _dot(left.T, written)
        else:
            query, key = (
                load_masked(ref.at[token[:, None], group, channel], is_real) for ref in keys
            )
            of_keys, of_queries, left = (
                load(solved.factors.at[chunk, head, jnp.int32(which), own])[:, None]
                for which in range(3)
            )
            kept = load(solved.factors.at[chunk, head, jnp.int32(3), jnp.int32(0)])
            parts = in_parts(state)
            written = _dot(inverse, value - of_keys * dot_parts(key, parts))
            asked = of_queries * dot_parts(query, parts)
            gained = dot_parts(key.T, in_parts(left * written))
        output = asked + _dot(load(solved.asked.at[tile]), written)
        store(outputs.at[target], output, mask=jnp.broadcast_to(is_real[:, None], (size, part)))
        return kept * state + gained

    state = jax.lax.fori_loop(0, pl.cdiv(count, size), step, load(before.at[where]))
    store(after.at[where], state)


def _keys(
    inputs: DeltaInputs, head: jax.Array, token: jax.Array, is_real: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    """The queries and keys of tokens, [tokens, K], each with its factor, float32 [tokens].

    The factors normalise them and scale queries. Queries and keys of other tokens are zeros.
    """
    key_heads, channels = inputs.key.shape[1:]
    own = head // (inputs.value.shape[1] // key_heads)
    where = token[:, None], own, jnp.arange(channels)[None, :]
    mask = jnp.broadcast_to(is_real[:, None], (len(token), channels))
    found = []
    for ref, scale in ((inputs.query, channels**-0.5), (inputs.key, 1.0)):
        x = load(ref.at[where], mask=mask, other=0)
        wide = x.astype(jnp.float32)
        found.append((x, scale * jax.lax.rsqrt((wide * wide).sum(1) + EPSILON)))
    return found


def _gates(
    inputs: DeltaInputs, head: jax.Array, token: jax.Array, is_real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The decays and rates of tokens, float32; zeros for other tokens."""
    decay, rate = (
        load(ref.at[token, head], mask=is_real, other=0).astype(jnp.float32)
        for ref in (inputs.decay, inputs.rate)
    )
    return decay, rate


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return current_target().dot_float32(a, b)
