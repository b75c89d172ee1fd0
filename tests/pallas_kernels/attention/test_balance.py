from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from mpjax.kernels.attention import balance
from mpjax.kernels.attention.combine import Partials
from mpjax.kernels.launch import Settings, launch

pytestmark = pytest.mark.any_version


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


# Most are of nine sequences, and share a compiled kernel.
CASES = {
    "equal": lambda rng: np.full(9, 31),
    "nothing": lambda rng: np.zeros(9),
    "one long": lambda rng: np.array([8, 8, 128, *[8] * 6]),
    "the others empty": lambda rng: np.array([0, 0, 300, *[0] * 6]),
    "nearly equal": lambda rng: rng.integers(30, 36, 9),
    "others of the mean": lambda rng: np.array([*[1] * 8, 19]),
    "any": lambda rng: rng.integers(0, 200, 9),
    "a few long": lambda rng: np.where(rng.random(20) < 0.2, 500, 3),
}


@pytest.mark.one_of(5)
@pytest.mark.parametrize(("splits", "own"), [(1, 1), (3, 3), (4, 6)])
@pytest.mark.parametrize("case", CASES)
def test_every_tile_is_read_once_and_no_program_reads_many(case, splits, own, rng):
    check(CASES[case](rng).astype(int), splits, own)


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


def test_equal_lengths_are_left_alone():
    programs, _ = tasks_of(np.full(5, 40), 2, 2)
    assert all(len(tasks) == 1 for tasks in programs)


def test_one_long_sequence_is_read_by_programs_of_short_ones():
    """Each reads hardly more than it would if all were equal."""
    programs, _ = tasks_of(np.array([512, *[16] * 31]), 1, 1)
    assert sum(len(tasks) > 1 for tasks in programs) > 20
