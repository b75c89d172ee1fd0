"""The gated delta rule for prefill as Triton kernels, on tensor cores.

Three kernels process chunks of tokens. The first computes the products of a chunk's tokens with
each other, and the second inverts their triangular system, both for all chunks at the same time:
the rest of a chunk's update is one product with the state before it. The third goes from chunk to
chunk with the state in registers; each of its programs has some values of a head.

Products are sums in float32. Queries and keys stay in bfloat16, as they are passed: products of the
two are exact. A float32 tile is split into two bfloat16 parts, which have 16 of its 24 bits; states
themselves stay in float32, and the system is inverted with all bits. Norms are factors of the
results. Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule
(arXiv 2406.06484).

Decays of key channels are factors inside the products over channels. No factor exceeds 1, whatever
the decays: between tokens of different blocks of a chunk there are two, and in a block each pair
has its own, in sums without tensor cores. Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.recurrent.delta_inputs import EPSILON, DeltaInputs
from mpjax.kernels.recurrent.products import dot_parts, in_parts
from mpjax.kernels.target import current_target

LEAST, MOST = 16, 64  # tokens of a chunk; a block has LEAST
PARTS = 2  # bfloat16 tiles in the place of a float32 one in products
OF_CHANNELS = 16  # channels at a time, with decays of key channels
LEAST_DECAY = -1e4  # exp of this is 0; sums of parts need finite decays
MOST_CHANNELS = 128  # of keys: more would not fit the registers and the shared memory


class Tiles(NamedTuple):
    """The tiles of the kernels, and their warps.

    part: value channels of a head in a program of the third kernel. keys: key channels of a head
    that it multiplies at a time. warps, stages: of that kernel. pair_warps: of the first.
    """

    part: int
    keys: int
    warps: int = 4
    stages: int = 1
    pair_warps: int = 4


TILES = Tiles(part=32, keys=128, stages=2), Tiles(part=64, keys=128, stages=2)
TILES_BY_CHANNEL = Tiles(part=32, keys=64)


def _tiles(by_channel: bool, values: int) -> Tiles:
    """The smaller tiles, if their programs for `values` values of all heads run at once."""
    if by_channel:
        return TILES_BY_CHANNEL
    return TILES[values > TILES[0].part * device.multiprocessors()]


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


class _Pairs(NamedTuple):
    """The parts of a chunk's update that don't depend on the state; inside kernels, references.

    inverse: bfloat16 [chunks, value heads, PARTS, tokens, tokens], the parts (`in_parts`) of the
        map from the differences between values and the state's values for keys to the written
        updates.
        Before `_invert`: float32 [chunks, value heads, tokens, tokens], A.
    asked: as inverse, the parts of the map from written updates to outputs.
    factors: float32 [chunks, value heads, 4, tokens], of the products of the state with keys and
        with queries, of keys with the written updates, and (all equal) of the state. With decays of
        channels: bfloat16 [chunks, value heads, 3, PARTS, tokens, K], the parts of keys and queries
        times the decays up to a token, and of keys times the decays after it.
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
    tokens, heads, width = inputs.value.shape
    most = min(tokens // size + len(counts), len(counts) * pl.cdiv(longest, size))
    chunks = Chunks.of(begins, counts, size, most)
    pairs = _solve(inputs, chunks, size, interpret=interpret)
    shapes = (
        jax.ShapeDtypeStruct((tokens, heads, width), jnp.float32),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    tiles = _tiles(inputs.decays_by_channel, heads * width)
    found: tuple[jax.Array, jax.Array] = launch(
        functools.partial(_advance, size=size),
        inputs,
        chunks,
        pairs,
        state,
        out_shape=shapes,
        grid=(heads * (width // min(tiles.part, width)), len(counts)),
        settings=Settings("gated_delta_chunks", warps=tiles.warps, stages=tiles.stages),
        interpret=interpret,
    )
    return found


def _solve(inputs: DeltaInputs, chunks: Chunks, size: int, *, interpret: bool) -> _Pairs:
    """The parts of all chunks' updates that don't depend on a state."""
    channels, by_channel = inputs.key.shape[2], inputs.decays_by_channel
    most, heads = len(chunks.chunk_begins), inputs.value.shape[1]
    square, wide = (size, size), (3, PARTS, size, channels)
    numbers: list[Any] = [
        (square, "float32"),
        ((PARTS, *square), "bfloat16"),
        ((4, size), "float32"),
    ]
    if by_channel:
        numbers[2:] = (wide, "bfloat16"), ((channels,), "float32")
    shapes = [jax.ShapeDtypeStruct((most, heads, *x), dtype) for x, dtype in numbers]
    found = launch(
        functools.partial(_pair_by_channel if by_channel else _pair, size=size),
        inputs,
        chunks,
        out_shape=tuple(shapes),
        grid=(heads, most * (size // LEAST) if by_channel else most),
        settings=Settings("gated_delta_pairs", warps=_tiles(by_channel, 0).pair_warps),
        interpret=interpret,
    )
    inverse = launch(
        functools.partial(_invert, size=size),
        *(inputs, chunks, found[0]),
        out_shape=shapes[1],
        grid=(heads, most),
        settings=Settings("gated_delta_invert", warps=1),
        interpret=interpret,
    )
    return _Pairs(inverse, *found[1:])


def _pair(inputs: DeltaInputs, chunks: Chunks, *references: Any, size: int) -> None:
    """Computes and stores `_Pairs` of a chunk and a head."""
    head, chunk, pairs = first_program_id(), pl.program_id(1), _Pairs(*references)
    begin, count = load(chunks.chunk_begins.at[chunk]), load(chunks.chunk_counts.at[chunk])
    own = jnp.arange(size)
    (query, asking), (key, known) = _keys(inputs, head, begin + own, own < count)
    decay, rate = _gates(inputs, head, begin + own, own < count)
    rows, columns = own[:, None], own[None, :]
    after = jnp.where(rows > columns, decay[:, None], 0.0)
    # Log-decays between two tokens are summed directly (see `delta_reference`), by exact products
    # of ones with the decays' parts.
    ones, zero = (rows >= columns).astype(jnp.bfloat16), jnp.zeros((), jnp.bfloat16)
    parts = [jnp.where(rows > columns, part[:, None], zero) for part in in_parts(decay)]
    factors = jnp.where(rows >= columns, jnp.exp(dot_parts(ones, parts)), 0.0) * known[None, :]
    begun, left = jnp.exp(jnp.cumsum(decay)), jnp.exp(after.sum(0))
    total = jnp.broadcast_to(jnp.exp(decay.sum()), (size,))
    for number, vector in enumerate((begun * known, begun * asking, left * known, total)):
        store(pairs.factors.at[chunk, head, jnp.int32(number), own], vector)
    asked = asking[:, None] * current_target().dot(query, key.T)
    _store_parts(pairs.asked, (chunk, head), (rows, columns), asked * factors)
    products = (rate * known)[:, None] * current_target().dot(key, key.T)
    store(pairs.inverse.at[chunk, head, rows, columns], products * factors)


def _store_parts(ref: Any, begin: tuple[Any, ...], end: tuple[Any, ...], tile: jax.Array) -> None:
    """Stores the parts of a float32 tile, which are an axis of the array."""
    for number, part in enumerate(in_parts(tile, PARTS)):
        store(ref.at[*begin, jnp.int32(number), *end], part)


def _load_parts(ref: Any, begin: tuple[Any, ...], end: tuple[Any, ...]) -> list[jax.Array]:
    """Loads what `_store_parts` has stored."""
    return [load(ref.at[*begin, jnp.int32(number), *end]) for number in range(PARTS)]


def _pair_by_channel(inputs: DeltaInputs, chunks: Chunks, *references: Any, size: int) -> None:
    """`_pair` with decays of key channels, for the rows of one block of LEAST tokens.

    Inside a block, each pair of tokens has its own factor. Decays between a block's token and one
    of an earlier block are two factors: after that token, and from the block's begin. No factor
    exceeds 1, whatever the decays.
    """
    head, program, pairs = first_program_id(), pl.program_id(1), _Pairs(*references)
    part, blocks = min(OF_CHANNELS, inputs.key.shape[2]), size // LEAST
    chunk, block, all_own = program // blocks, program % blocks, jnp.arange(size)
    begin, count = load(chunks.chunk_begins.at[chunk]), load(chunks.chunk_counts.at[chunk])
    group = head // (inputs.value.shape[1] // inputs.key.shape[1])
    own = block * LEAST + jnp.arange(LEAST)
    rows, columns = own[:, None], all_own[None, :]
    is_real, are_real = own < count, all_own < count
    (_, asking), (_, known) = _keys(inputs, head, begin + own, is_real)
    _, (_, all_known) = _keys(inputs, head, begin + all_own, are_real)
    rate = load(inputs.rate.at[begin + own, head], mask=is_real, other=0).astype(jnp.float32)
    # Which tokens' decays are summed: up to a row in its block, and in the chunk; after a row; and
    # between a token and the block.
    in_block = columns >= block * LEAST
    sums = (columns <= rows) & in_block, columns <= rows, columns > rows
    between = (columns > all_own[:, None]) & ~in_block
    is_earlier = (all_own < block * LEAST)[:, None]

    def add(number: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        channel = (number * part + jnp.arange(part))[None, :]
        query, key = (
            load_masked(ref.at[rows + begin, group, channel], is_real).astype(jnp.float32)
            for ref in (inputs.query, inputs.key)
        )
        earlier, decay = (
            load_masked(ref.at[(begin + all_own)[:, None], which, channel], are_real).astype(
                jnp.float32
            )
            for ref, which in ((inputs.key, group), (inputs.decay, head))
        )
        decays = in_parts(jnp.maximum(decay, LEAST_DECAY))
        from_block, passed, left = (jnp.exp(_sums(which, decays)) for which in sums)
        tiles = known[:, None] * key * passed, asking[:, None] * query * passed
        for which, tile in enumerate((*tiles, known[:, None] * key * left)):
            begin_of = chunk, head, jnp.int32(which)
            _store_parts(pairs.factors, begin_of, (rows, channel), tile)
        store(pairs.kept.at[chunk, head, channel[0]], jnp.exp(decay.sum(0)))
        by = jnp.where(is_earlier, earlier * jnp.exp(_sums(between, decays)), 0.0)
        inside = _pairs_inside(inputs, head, (begin + own, is_real), channel)
        found = tuple(x + new for x, new in zip(found, inside, strict=False)) + found[2:]
        new = _dot(key * from_block, by.T), _dot(query * from_block, by.T)
        return found[:2] + tuple(x + y for x, y in zip(found[2:], new, strict=True))

    zeros = [jnp.zeros((LEAST, width), jnp.float32) for width in (LEAST, size)]
    found = jax.lax.fori_loop(
        0, inputs.key.shape[2] // part, add, (zeros[0], zeros[0], zeros[1], zeros[1])
    )
    of_rows, others = (rate * known, asking), (columns // LEAST) != block
    places = (rows, own[None, :], known, None), (rows, columns, all_known, others)
    for (row, column, of_columns, mask), tiles in zip(places, (found[:2], found[2:]), strict=True):
        products, asked = (
            factor[:, None] * tile * of_columns[None, :]
            for factor, tile in zip(of_rows, tiles, strict=True)
        )
        _store_some(pairs.inverse.at[chunk, head, row, column], products, mask)
        for number, some in enumerate(in_parts(asked, PARTS)):
            _store_some(pairs.asked.at[chunk, head, jnp.int32(number), row, column], some, mask)


def _store_some(ref: Any, tile: jax.Array, mask: jax.Array | None) -> None:
    """Stores a tile, or its elements in a mask, which is broadcast."""
    store(ref, tile, mask=None if mask is None else jnp.broadcast_to(mask, tile.shape))


def _sums(which: jax.Array, decays: list[jax.Array]) -> jax.Array:
    """For each row of bools [rows, tokens], the sum of these tokens' decays [tokens, part].

    decays: their parts. Log-decays are summed directly: see `delta_reference`.
    """
    return dot_parts(which.astype(jnp.bfloat16), decays)


def _pairs_inside(
    inputs: DeltaInputs, head: jax.Array, tokens: tuple[jax.Array, jax.Array], channel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A block's products of keys, and of queries, with keys, for some channels, [LEAST, LEAST].

    tokens: the block's, and which of them are real. Each pair has its own factor.
    """
    (token, is_real), own = tokens, jnp.arange(LEAST)
    group = head // (inputs.value.shape[1] // inputs.key.shape[1])
    later, earlier = own[:, None, None], own[None, :, None]
    query, key, decay = (
        load_masked(ref.at[token[:, None], which, channel], is_real).astype(jnp.float32)
        for ref, which in ((inputs.query, group), (inputs.key, group), (inputs.decay, head))
    )
    after = jnp.cumsum(jnp.where(later > earlier, decay[:, None, :], 0.0), axis=0)
    known_by = jnp.where(later >= earlier, jnp.exp(after), 0.0) * key[None, :, :]
    return (key[:, None, :] * known_by).sum(2), (query[:, None, :] * known_by).sum(2)


def _invert(inputs: DeltaInputs, chunks: Chunks, before: Any, inverse: Any, *, size: int) -> None:
    """Stores the parts of (I + A)⁻¹ · rate. A: the rated products of keys of a chunk and a head.

    A's part on and above the diagonal is ignored. Blocks of LEAST tokens are inverted row by row;
    those below the diagonal follow from A's and from inverses nearer to it.
    """
    head, chunk = first_program_id(), pl.program_id(1)
    begin, count = load(chunks.chunk_begins.at[chunk]), load(chunks.chunk_counts.at[chunk])
    own, blocks = jnp.arange(LEAST), size // LEAST

    def place(row: int, column: int) -> tuple[jax.Array, jax.Array]:
        return row * LEAST + own[:, None], column * LEAST + own[None, :]

    cut = {
        (row, column): load(before.at[chunk, head, *place(row, column)])
        for row in range(blocks)
        for column in range(row)
    }
    # Transposed, so that a row of A is a column, which multiplies the rows of the inverse.
    turned = [
        load(before.at[chunk, head, row * LEAST + own[None, :], row * LEAST + own[:, None]])
        for row in range(blocks)
    ]
    lower = [jnp.where(own[:, None] < own[None, :], tile, 0.0) for tile in turned]

    def add(number: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_own, is_row = (own == number)[None, :], (own == number)[:, None]
        rows = [jnp.where(is_own, tile, 0.0).sum(1) for tile in lower]
        new = [(row[:, None] * tile).sum(0) for row, tile in zip(rows, found, strict=True)]
        return tuple(
            tile - jnp.where(is_row, one[None, :], 0.0)
            for tile, one in zip(found, new, strict=True)
        )

    unit = jnp.where(own[:, None] == own[None, :], 1.0, 0.0)
    whole = jax.lax.fori_loop(1, LEAST, add, (unit,) * blocks)
    found = {(row, row): tile for row, tile in enumerate(whole)}
    for distance in range(1, blocks):
        for row in range(distance, blocks):
            column = row - distance
            terms = [_dot(cut[row, n], found[n, column]) for n in range(column, row)]
            found[row, column] = -_dot(whole[row], functools.reduce(jnp.add, terms))
    for row, column in itertools.product(range(blocks), repeat=2):
        token = column * LEAST + own
        rate = load(inputs.rate.at[begin + token, head], mask=token < count, other=0)
        tile = found.get((row, column), jnp.zeros_like(unit))
        tile = tile * rate.astype(jnp.float32)[None, :]
        _store_parts(inverse, (chunk, head), place(row, column), tile)


def _advance(
    inputs: DeltaInputs,
    chunks: Chunks,
    pairs: _Pairs,
    before: Any,
    outputs: Any,
    after: Any,
    *,
    size: int,
) -> None:
    """Advances some values of a head's state by the chunks of a sequence."""
    program, sequence = first_program_id(), pl.program_id(1)
    heads, channels, width = before.shape[1:]
    by_channel = pairs.kept is not None
    tiles = _tiles(by_channel, heads * width)
    part, keys = min(tiles.part, width), min(tiles.keys, channels)
    head, values = (
        program // (width // part),
        program % (width // part) * part + jnp.arange(part),
    )
    group = head // (heads // inputs.key.shape[1])
    cuts = [number * keys + jnp.arange(keys) for number in range(channels // keys)]
    begin, count = load(chunks.begins.at[sequence]), load(chunks.counts.at[sequence])
    first, own = load(chunks.firsts.at[sequence]), jnp.arange(size)
    where = [(sequence, head, cut[:, None], values[None, :]) for cut in cuts]

    def step(number: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        passed = number * size
        is_real = own < count - passed
        token = begin + passed + own
        chunk = first + number
        tile = own[:, None], own[None, :]
        target = token[:, None], head, values[None, :]

        def vector(which: int) -> jax.Array:
            return load(pairs.factors.at[chunk, head, jnp.int32(which), own])[:, None]

        def narrow(ref: Any, cut: jax.Array) -> jax.Array:
            return load_masked(ref.at[token[:, None], group, cut[None, :]], is_real)

        def wide(which: int, cut: jax.Array) -> list[jax.Array]:
            begin = chunk, head, jnp.int32(which)
            return _load_parts(pairs.factors, begin, (own[:, None], cut[None, :]))

        value = load_masked(inputs.value.at[target], is_real).astype(jnp.float32)
        of_part = [(cut, in_parts(state, PARTS)) for cut, state in zip(cuts, states, strict=True)]
        inverse = _load_parts(pairs.inverse, (chunk, head), tile)
        if by_channel:
            known = _total(dot_parts(wide(0, cut), some) for cut, some in of_part)
            written = in_parts(dot_parts(inverse, in_parts(value - known, PARTS)), PARTS)
            asked = _total(dot_parts(wide(1, cut), some) for cut, some in of_part)
            gained = [dot_parts([x.T for x in wide(2, cut)], written) for cut in cuts]
            kept = [load(pairs.kept.at[chunk, head, cut])[:, None] for cut in cuts]
        else:
            known = _total(dot_parts(narrow(inputs.key, cut), some) for cut, some in of_part)
            found = dot_parts(inverse, in_parts(value - vector(0) * known, PARTS))
            asked = _total(dot_parts(narrow(inputs.query, cut), some) for cut, some in of_part)
            asked *= vector(1)
            written, left = (in_parts(x, PARTS) for x in (found, vector(2) * found))
            gained = [dot_parts(narrow(inputs.key, cut).T, left) for cut in cuts]
            kept = [load(pairs.factors.at[chunk, head, jnp.int32(3), jnp.int32(0)])] * len(cuts)
        output = asked + dot_parts(_load_parts(pairs.asked, (chunk, head), tile), written)
        store(outputs.at[target], output, mask=jnp.broadcast_to(is_real[:, None], (size, part)))
        return tuple(
            rest * state + new for rest, state, new in zip(kept, states, gained, strict=True)
        )

    states = tuple(load(before.at[place]) for place in where)
    states = jax.lax.fori_loop(0, pl.cdiv(count, size), step, states)
    for place, state in zip(where, states, strict=True):
        store(after.at[place], state)


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


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
    """The decays, at least LEAST_DECAY, and rates of tokens, float32; zeros for other tokens."""
    decay, rate = (
        load(ref.at[token, head], mask=is_real, other=0).astype(jnp.float32)
        for ref in (inputs.decay, inputs.rate)
    )
    return jnp.maximum(decay, LEAST_DECAY), rate


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return current_target().dot_float32(a, b)
