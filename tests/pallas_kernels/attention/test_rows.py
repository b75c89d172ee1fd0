from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.attention import rows, tiles
from mpjax.kernels.launch import Settings, first_program_id, launch, store

GROUP, KV_HEADS, LONGEST, NUMBERS = 3, 2, 4, 16
STARTS, COUNTS = [10, 0, 7], [4, 0, 2]


@pytest.mark.parametrize("is_varlen", [False, True])
def test_rows_are_tokens_and_the_query_heads_of_a_kv_head(is_varlen):
    """For every sequence and KV head, rows are where counting tokens and heads puts them."""
    firsts = np.cumsum([0, *COUNTS[:-1]]) if is_varlen else np.arange(3) * LONGEST
    offsets = jnp.asarray(firsts, jnp.int32) if is_varlen else None

    def kernel(references: Any, out_ref: Any) -> None:
        offsets_ref, starts_ref, counts_ref = references
        program = first_program_id()
        batch, head = program // KV_HEADS, program % KV_HEADS
        sequence = rows.SequenceHead(batch, head, starts_ref[batch], counts_ref[batch])
        found = rows.rows_of(jnp.arange(NUMBERS), sequence, GROUP, LONGEST, offsets_ref)
        for i, field in enumerate((found.token, found.query_head, found.position, found.mask)):
            out_ref[program, i] = field.astype(jnp.int32)
        out_ref[program, 4] = jnp.full(NUMBERS, found.real)

    out = launch(
        kernel,
        (offsets, jnp.asarray(STARTS), jnp.asarray(COUNTS)),
        out_shape=jax.ShapeDtypeStruct((3 * KV_HEADS, 5, NUMBERS), jnp.int32),
        grid=(3 * KV_HEADS,),
        settings=Settings("rows"),
        interpret=True,
    )
    for program, (token, query_head, position, mask, real) in enumerate(np.asarray(out)):
        batch, head = divmod(program, KV_HEADS)
        there = COUNTS[batch] if is_varlen else LONGEST
        expected = [(t, h) for t in range(there) for h in range(GROUP)]
        assert (real == COUNTS[batch] * GROUP).all()
        assert mask.sum() == len(expected)
        assert mask[: len(expected)].all()
        for number, (of_sequence, of_group) in enumerate(expected):
            assert token[number] == firsts[batch] + of_sequence
            assert query_head[number] == head * GROUP + of_group
            assert position[number] == STARTS[batch] + of_sequence


@pytest.mark.parametrize("counts", [[5, 0, 1, 8], [0, 3, 0, 0], [0, 0], [7], [2, 0] * 20 + [9]])
def test_varlen_tiles_are_those_of_all_sequences(counts):
    """Tiles of sequences, one after another; those that are left have no rows of the last one."""
    group, size, padding = 3, 4, 2
    most = rows.most_varlen_tiles((sum(counts) + padding) * group, len(counts), size)
    expected = [
        (sequence, first)
        for sequence, count in enumerate(counts)
        for first in range(0, count * group, size)
    ]
    assert len(expected) <= most <= len(counts) + (sum(counts) + padding) * group // size

    def kernel(counts_ref: Any, out_ref: Any) -> None:
        program = first_program_id()
        sequence, first = rows.varlen_tile(counts_ref, program, group, size)
        out_ref[program, 0], out_ref[program, 1] = sequence, first

    out = launch(
        kernel,
        jnp.asarray(counts),
        out_shape=jax.ShapeDtypeStruct((most, 2), jnp.int32),
        grid=(most,),
        settings=Settings("tiles"),
        interpret=True,
    )
    found = [tuple(map(int, tile)) for tile in out]
    assert found[: len(expected)] == expected
    for sequence, first in found[len(expected) :]:
        assert sequence == len(counts) - 1
        assert first >= counts[-1] * group


def test_channels_that_there_are_not_are_masked():
    whole, padded = (
        rows.Rows(
            jnp.arange(8), jnp.arange(8), jnp.arange(8), jnp.arange(8) < 5, jnp.int32(5)
        ).locate(tiles.Part(tiles.Words(0, 16, width), range(1)))
        for width in (16, 12)
    )
    for (token, query_head, channel), mask in (whole, padded):
        assert token.shape == query_head.shape == (8, 1)
        np.testing.assert_array_equal(channel, [range(16)])
        np.testing.assert_array_equal(
            mask.any(1) if mask.shape[1] > 1 else mask[:, 0], [1] * 5 + [0] * 3
        )
    assert padded[1].shape == (8, 16)
    np.testing.assert_array_equal(padded[1][0], [True] * 12 + [False] * 4)


@pytest.mark.parametrize(
    ("span", "plane"),
    [
        (tiles.Words(0, 16, 16), 3),
        (tiles.Words(0, 64, 64), 1),
        (tiles.Words(32, 16, 48), 1),
        (tiles.Words(0, 32, 24), 3),
    ],
)
def test_few_rows_come_as_others_do(span, plane, rng):
    """Also rows and channels that there are not."""
    part = tiles.Part(span, range(plane, plane + 1))
    queries = rng.standard_normal((3, 5, (plane + 1) * span.width)).astype(np.float32)

    def kernel(queries_ref: Any, out_ref: Any) -> None:
        number = jnp.arange(8)
        found = rows.Rows(number // 3, number % 3 + 2, number, number < 7, jnp.int32(7))
        out_ref[0] = found.load(queries_ref, part)
        out_ref[1] = found.load_few(queries_ref, part)

    whole, in_pieces = launch(
        kernel,
        jnp.asarray(queries),
        out_shape=jax.ShapeDtypeStruct((2, 8, span.size), jnp.float32),
        grid=(1,),
        settings=Settings("queries"),
        interpret=True,
    )
    np.testing.assert_array_equal(in_pieces, whole)
    there = min(span.size, span.width - span.first)
    first = plane * span.width + span.first
    expected = np.zeros((8, span.size), np.float32)
    for row in range(7):
        expected[row, :there] = queries[row // 3, row % 3 + 2, first : first + there]
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_largest_magnitude_of_each_row(dim, rng):
    """Rows that there aren't have none."""
    queries = rng.standard_normal((8, 1, dim)).astype(np.float16)

    def kernel(queries_ref: Any, out_ref: Any) -> None:
        token = jnp.arange(8)
        found = rows.Rows(token, token * 0, token, token < 6, jnp.int32(6))
        store(out_ref.at[token], found.largest(queries_ref))

    out = launch(
        kernel,
        jnp.asarray(queries),
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        grid=(1,),
        settings=Settings("largest"),
        interpret=True,
    )
    expected = np.abs(queries.astype(np.float32)).max((1, 2))
    np.testing.assert_array_equal(out, np.where(np.arange(8) < 6, expected, 0))
