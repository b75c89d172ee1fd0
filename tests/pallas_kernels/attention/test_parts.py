"""The parts of the attention kernel, each alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from mpjax.kernels.attention import balance, rows, tiles
from mpjax.kernels.attention import combine as combine_module
from mpjax.kernels.attention.combine import (
    FLOOR,
    PARTIALS_AT_ONCE,
    Partials,
    combine,
    combine_balanced,
)
from mpjax.kernels.attention.key_range import KeyRange
from mpjax.kernels.launch import Settings, first_program_id, launch


@given(st.integers(1, 600))
def test_spans_cover_a_width_once(width):
    spans = tiles.cover(width)
    assert spans[0].first == 0
    for span, following in itertools.pairwise(spans):
        assert following.first == span.first + span.size
        assert span.mask is None
    for span in spans:
        assert span.size >= tiles.MINIMUM_WORDS
        assert span.size & (span.size - 1) == 0
    last = spans[-1]
    assert last.first < width <= last.first + last.size
    assert (last.mask is None) == (last.first + last.size == width)
    assert last.size - (width - last.first) < tiles.MINIMUM_WORDS


@pytest.mark.parametrize("slots", [64, 128])
def test_nothing_behind_a_table_is_looked_up(slots, monkeypatch):
    """Interpreted, a kernel moves the index back into the table; a GPU reads what is there."""

    class Indices:
        shape = (2, 20)
        at = property(lambda self: self)

        def __getitem__(self, index):
            return index

    monkeypatch.setattr(tiles, "load", lambda index: index[1])
    every = jnp.arange(tiles.PAGES_AT_ONCE) * 3
    entries = tiles.look_up(every, slots, 128, Indices(), jnp.int32(1))
    assert entries.max() == 19


PROGRAMS = 3


@pytest.mark.parametrize(
    ("begin", "end", "limit", "expected"),
    [
        (0, 0, None, []),
        (0, 1000, None, [2, 5, 8, 11, 14]),
        (-70, 64 * 8, None, [2, 5]),
        (64 * 3, 64 * 8 + 1, None, [5, 8]),
        (64 * 3 + 63, 1000, 6, [5, 8]),
        (0, 64 * 6, 50, [2, 5]),
    ],
)
def test_tiles_between_positions(begin, end, limit, expected):
    limit = None if limit is None else jnp.int32(limit)
    key_range = KeyRange(*[None] * 4, 64, jnp.int32(2), PROGRAMS, None, None, limit)  # type: ignore[arg-type, call-arg]
    first, count = key_range.tiles_between(jnp.int32(begin), jnp.int32(end))
    assert [int(first) + PROGRAMS * number for number in range(int(count))] == expected


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


@functools.cache
def tasks_kernel(
    batch: int, splits: int, own: int, has_one_loop: bool
) -> Callable[[jax.Array], Any]:
    """Rows of sequence, split, first tile, stride, end, slot and is_whole of each program's tasks.

    Also their Partials, which say which pieces are joined. The argument is int32 [batch], the tiles
    of each sequence.
    """
    most = batch + 1
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def kernel(references: Any, out_ref: Any, parts: Partials) -> None:
        sequence, split = pl.program_id(0), pl.program_id(1)
        shares = balance.Balance(
            *references, lambda start, count: start + count, splits=splits, own=own
        )
        pieces = shares.pieces(sequence, split)
        out_ref[sequence, split] = jnp.full((most, 7), -1)

        def note(number: Any, task: balance.Task) -> None:
            shares.store_pieces(task, parts, mask=sequence >= 0)
            fields = (*task[:6], task.is_whole)
            out_ref[sequence, split, number] = jnp.stack([jnp.int32(x) for x in fields])

        def perform(number: jax.Array, begin: jax.Array) -> jax.Array:
            left = sequence, split, begin, pieces.end
            task, begin = shares.any_task(number, *left) if has_one_loop else shares.piece(*left)
            note(number, task)
            return begin

        if not has_one_loop:
            note(0, shares.own_task(sequence, split))
        first = jnp.int32(not has_one_loop)
        jax.lax.fori_loop(first, 1 + pieces.sequences, perform, pieces.begin)

    def run(lengths: jax.Array) -> Any:
        return launch(
            kernel,
            (lengths, jnp.zeros(batch, jnp.int32)),
            out_shape=(
                jax.ShapeDtypeStruct((batch, own, most, 7), jnp.int32),
                Partials(None, None, numbers, numbers),
            ),
            grid=(batch, own),
            settings=Settings("balance"),
            interpret=True,
        )

    return jax.jit(run)


def tasks_of(
    lengths: np.ndarray, splits: int, own: int, *, has_one_loop: bool = False
) -> tuple[list[np.ndarray], Partials]:
    """The tasks of each program, and the Partials: see `tasks_kernel`."""
    run = tasks_kernel(len(lengths), splits, own, has_one_loop)
    out, parts = run(jnp.asarray(lengths, jnp.int32))
    programs = np.asarray(out).reshape(len(lengths) * own, -1, 7)
    return [tasks[tasks[:, 0] >= 0] for tasks in programs], jax.tree.map(np.asarray, parts)


@pytest.mark.any_version
@given(
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.integers(0, 200),
    st.sampled_from([(1, 1), (4, 6), (16, 18)]),
)
def test_so_it_is_whatever_the_lengths(lengths, last, numbers):
    check(np.array([*lengths, last]), *numbers)


def check(lengths: np.ndarray, splits: int, own: int) -> None:
    programs, parts = tasks_of(lengths, splits, own)
    same, of_same = tasks_of(lengths, splits, own, has_one_loop=True)
    jax.tree.map(np.testing.assert_array_equal, programs, same)
    np.testing.assert_array_equal(parts.first_pieces, of_same.first_pieces)
    np.testing.assert_array_equal(*(p.last_pieces[p.first_pieces >= 0] for p in (parts, of_same)))
    read: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
    pieces: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
    slots = []
    for number, tasks in enumerate(programs):
        count = 0
        for batch, split, first, stride, end, slot, is_whole in tasks.tolist():
            slots.append(slot)
            is_piece = split < 0
            assert is_piece or (batch, split) == divmod(number, own)
            if split >= splits and not is_piece:
                continue  # it reads the residual
            tiles = list(range(first, min(end, lengths[batch]), stride))
            assert is_piece <= bool(tiles)
            read[batch] += tiles
            count += len(tiles)
            if is_piece:
                pieces[batch].append(slot)
            assert is_whole == (not is_piece and lengths[batch] <= splits * most(lengths, splits))
        assert count <= most(lengths, splits)
    for batch, length in enumerate(lengths):
        assert sorted(read[batch]) == list(range(length))
        if not pieces[batch]:
            assert parts.first_pieces[batch] == -1
            continue
        # Whoever joins them reads all from the first one on.
        expected = range(parts.first_pieces[batch], parts.last_pieces[batch] + 1)
        assert sorted(pieces[batch]) == list(expected)
    assert len(set(slots)) == len(slots)
    assert max(slots) < balance.slots(len(lengths), own, splits)


def most(lengths: np.ndarray, splits: int) -> int:
    return balance.most_tiles(-(-int(lengths.sum()) // (len(lengths) * splits)))


@pytest.mark.any_version
def test_one_long_sequence_is_read_by_programs_of_short_ones():
    """Each reads hardly more than it would if all were equal."""
    programs, _ = tasks_of(np.array([512, *[16] * 31]), 1, 1)
    assert sum(len(tasks) > 1 for tasks in programs) > 20


@pytest.mark.parametrize("programs", [1, 1024])
@pytest.mark.parametrize(("splits", "dim"), [(3, 64), (5, 96), (70, 96)])
def test_parts_count_by_their_weights(splits, dim, programs, rng, monkeypatch):
    """A program reads 32 of 70 channels; four heads of few, if there must be few programs."""
    monkeypatch.setattr(combine_module, "ENOUGH_PROGRAMS", programs)
    outputs = rng.standard_normal((3, 2, splits, dim)).astype(np.float32)
    sums = rng.uniform(-200, 200, (3, 2, splits)).astype(np.float32)
    sums[1, 1] = rng.uniform(-1, 1, splits)
    sums[2, :, 1:] = FLOOR
    outputs[0] = 0
    sums[0] = FLOOR  # no part saw a key
    weights = np.exp2(sums.astype(np.float64) - sums.max(-1, keepdims=True))
    expected = (outputs * weights[..., None]).sum(2) / weights.sum(-1)[..., None]
    found = combine(jnp.asarray(outputs), jnp.asarray(sums), jnp.dtype("float32"), interpret=True)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("programs", [1, 5, 1024])
@pytest.mark.parametrize(("own", "dim"), [(1, 64), (2, 96)])
def test_balanced_parts_are_joined_with_pieces_of_their_sequence(
    own, dim, programs, rng, monkeypatch
):
    """Two tokens each, more pieces than are read at once, and NaN in slots that are not written.

    Later pieces have larger peaks, and the last ones smaller. Five programs have two or three of
    the twelve rows each.
    """
    monkeypatch.setattr(combine_module, "ENOUGH_PROGRAMS", programs)
    batch, heads, pieces = 3, 2, 2 * PARTIALS_AT_ONCE + 6
    firsts, lasts = np.array([-1, batch * own, -1]), np.array([7, batch * own + pieces - 1, -9])
    outputs = rng.standard_normal((batch * own + pieces + 4, 2, heads, dim)).astype(np.float32)
    sums = rng.uniform(-9, 9, outputs.shape[:3]).astype(np.float32)
    sums[batch * own + PARTIALS_AT_ONCE :] += 6  # so that what came before shrinks
    sums[batch * own + 2 * PARTIALS_AT_ONCE :] -= 12
    outputs[-4:], sums[-4:] = np.nan, np.nan
    expected = np.empty((batch, 2, heads, dim))
    for b in range(batch):
        slots = [*range(b * own, (b + 1) * own)]
        slots += range(firsts[b], lasts[b] + 1) if firsts[b] >= 0 else []
        weights = np.exp2(sums[slots].astype(np.float64))[..., None]
        expected[b] = (outputs[slots] * weights).sum(0) / weights.sum(0)
    whole = np.zeros((2 * batch, heads, 1, dim), np.float32) if own == 1 else None
    if whole is not None:  # stored already, without a word in the parts
        whole[:2], whole[4:] = 5, 6
        expected[0], expected[2] = 5, 6
    parts = Partials(
        jnp.asarray(outputs.reshape(-1, heads, 1, dim)),
        jnp.asarray(sums.reshape(-1, heads, 1)),
        jnp.asarray(firsts.astype(np.int32)),
        jnp.asarray(lasts.astype(np.int32)),
        None if whole is None else jnp.asarray(whole),
    )
    found = combine_balanced(parts, 2 * batch, jnp.dtype("float32"), own=own, interpret=True)
    found = np.asarray(found).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
