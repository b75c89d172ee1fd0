"""Programs that help where one sequence is longer than others: the host does not know lengths.

Each sequence has programs of its own. Of one that has more tiles than they should read, they leave
the rest, and programs of short sequences, once done with those, read it: laid end to end, what is
left is dealt out by what each has room for (Stream-K, Osama et al. 2023, but of what is left only).
So where lengths are equal all is as it would be without. The grid always is: programs more than fit
on the GPU at once, though they have nothing to do, keep it from spreading the others evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.attention.combine import Parts
from mpjax.kernels.launch import load, store
from mpjax.kernels.registers import WARP

SLACK = 8  # a program may read an eighth more than the mean, and a tile, before others help


class Task(NamedTuple):
    """Tiles of one sequence for one program, counted from the first one that is visible."""

    batch: jax.Array
    split: jax.Array  # the program's number in the sequence, or -1, which has no sink, if it helps
    first: jax.Array  # tile
    stride: Any  # from one to the next; an int where it is known
    end: jax.Array  # before which they are
    slot: jax.Array  # of what is found, among all that is
    told: jax.Array  # where a sequence's pieces begin, or -1 if it has none
    tells_first: Any  # whether this is the task to tell it
    tells_last: Any  # whether its slot is where they end; False where that is known
    is_piece: bool = False  # whether the program only helps
    is_whole: Any = False  # whether nobody helps this sequence


class Pieces(NamedTuple):
    """What a program reads of what is left, by positions in it."""

    number: jax.Array  # of pieces
    begin: jax.Array
    end: jax.Array


def most_tiles(tiles: int) -> int:
    """Tiles of a task, where a program has this many if all sequences are as long as can be."""
    return tiles + tiles // SLACK + 1


class Balance:
    """Who reads which tiles; inside a kernel.

    tiles_of: how many tiles are read of sequences with these starts and so many new tokens.
    splits: of a sequence's `own` programs, how many share those.
    """

    def __init__(
        self,
        starts_ref: Any,  # [batch]
        counts_ref: Any,  # [batch]
        tiles_of: Callable[[jax.Array, jax.Array], jax.Array],
        *,
        splits: int,
        own: int,
    ) -> None:
        self.splits, self.own, self.sequences = splits, own, starts_ref.shape[0]
        # At least a warp's: fewer are held by several lanes alike, which made KV2 an eighth slower.
        self.lane = jnp.arange(max(WARP, pl.next_power_of_2(self.sequences)))
        mask = self.lane < self.sequences
        starts, counts = (
            load(x.at[self.lane], mask=mask, other=0) for x in (starts_ref, counts_ref)
        )
        tiles = jnp.where(mask, tiles_of(starts, counts), 0)
        mean = pl.cdiv(tiles.sum(), self.sequences * splits)  # of a program
        self.most = mean + jax.lax.div(mean, jnp.int32(SLACK)) + 1
        each = pl.cdiv(tiles, splits)
        self.left = jnp.maximum(tiles - splits * self.most, 0)
        # Those with no more than the mean have room for all that others have more, and for slack:
        # where it is rounded up, some programs have less.
        self.room = jnp.where(mask & (each <= mean), self.most - each, 0)  # of each program

    def pieces(self, batch: jax.Array, split: jax.Array) -> Pieces:
        """Those of a program.

        What branches of a `cond` return must be computed, for Pallas gives Triton no constants
        there: hence the number that is zero times another.
        """
        total = self.left.sum()

        def find() -> Pieces:
            room = self._of(batch, self.room)
            begin = self._before(batch, self.room * self.splits) + split * room
            end = jnp.minimum(begin + room, total)
            last = jnp.cumsum(self.left)
            is_mine = (self.left > 0) & (last - self.left < end) & (begin < last)
            count = is_mine.astype(jnp.int32).sum()
            return Pieces(jnp.where(begin < end, count, 0), begin, end)

        def find_none() -> Pieces:
            return Pieces(total * 0, total, total)

        return jax.lax.cond((total > 0) & (split < self.splits), find, find_none)

    def own_task(self, batch: jax.Array, split: jax.Array) -> Task:
        """What the program of a sequence does first."""
        is_whole = self._of(batch, self.left) == 0
        end, slot = self.splits * self.most, batch * self.own + split
        tells = jnp.int32(-1), is_whole & (split == 0), False
        return Task(batch, split, split, self.splits, end, slot, *tells, is_whole=is_whole)

    def piece(
        self, batch: jax.Array, split: jax.Array, begin: jax.Array, end: jax.Array
    ) -> tuple[Task, jax.Array]:
        """The task of the same program that begins at a position of what is left, and its end."""
        last = jnp.cumsum(self.left)
        mine = (last - self.left <= begin) & (begin < last)
        whose = jnp.where(mine, self.lane, 0).sum()
        behind = self._of(whose, last)
        before = behind - self._of(whose, self.left)
        first = self.splits * self.most + begin - before
        end = jnp.minimum(end, behind)
        # From one piece to the next it is another helper, or another sequence.
        helpers = self._before(batch, jnp.where(self.room > 0, self.splits, 0)) + split
        number = helpers + self._before(whose, jnp.where(self.left > 0, 1, 0))
        slot = self.sequences * self.own + number
        tells = slot, begin == before, end == behind
        stop = first + end - begin
        return Task(whose, jnp.int32(-1), first, 1, stop, slot, *tells, is_piece=True), end

    def any_task(
        self,
        number: jax.Array,
        batch: jax.Array,
        split: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> tuple[Task, jax.Array]:
        """Number 0 of a program's tasks, its own, or a piece; and where the next piece begins."""
        is_own, own = number == 0, self.own_task(batch, split)
        piece, behind = self.piece(batch, split, begin, end)
        fields: dict[str, Any] = {
            name: jnp.where(is_own, getattr(own, name), getattr(piece, name))
            for name in ("batch", "split", "first", "end", "slot", "told", "tells_first")
        }
        # Of two constants, Pallas takes the chosen one for a single bit.
        fields["stride"] = 1 + is_own.astype(jnp.int32) * (self.splits - 1)
        fields["tells_last"], fields["is_whole"] = ~is_own & piece.tells_last, is_own & own.is_whole
        return Task(**fields), jnp.where(is_own, begin, behind)

    def tell(self, task: Task, parts: Parts, *, tells: jax.Array) -> None:
        """Tells who joins the results where those of a sequence's pieces are.

        tells: whether this program is the one to say it. By masks: a branch that is the same for
            all pieces would make the compiler copy the whole loop over them.
        """

        def store_one(ref: Any, number: jax.Array, mask: jax.Array) -> None:
            target = ref.at[task.batch + jnp.arange(1)]
            store(target, jnp.full(1, number), mask=jnp.full(1, mask & tells))

        store_one(parts.firsts, task.told, task.tells_first)
        if task.tells_last is not False:
            store_one(parts.lasts, task.slot, task.tells_last)

    def _of(self, sequence: jax.Array, x: jax.Array) -> jax.Array:
        """A sequence's among those of all."""
        return jnp.where(self.lane == sequence, x, 0).sum()

    def _before(self, sequence: jax.Array, x: jax.Array) -> jax.Array:
        """The sum of those of all sequences before one."""
        return jnp.where(self.lane < sequence, x, 0).sum()


def slots(batch: int, own: int, splits: int) -> int:
    """Results that there may be: of own tasks and, behind them, of pieces.

    Each of these ends where a program's room does or what is left of a sequence.
    """
    return batch * (own + splits + 1)
