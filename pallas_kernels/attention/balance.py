"""Balances programs if one sequence is longer than others, inside the attention kernel.

The host does not know the lengths, so the grid is the same for all: each sequence has its own
programs. A limit, a little above the mean, bounds the tiles that a program should process. Tiles of
a long sequence above the limit of its own programs are its surplus. Programs of short sequences
process it after their own tiles. The surplus of all sequences, laid end to end, is divided by how
much room each program has below the limit (Stream-K, Osama et al. 2023, applied to the surplus
alone). With equal lengths there is no surplus, and nothing changes.
The grid gets no further programs for the surplus: more programs than fit on the GPU at once, even
idle ones, prevent an even distribution of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.attention.combine import Partials
from mpjax.kernels.launch import load, store
from mpjax.kernels.registers import WARP

# The limit of a program is the mean number of tiles plus 1/SLACK of it and one more tile.
SLACK = 8


class Task(NamedTuple):
    """Tiles of one sequence for one program; tile 0 is the first that a row attends to.

    A program's first task is its own share of its sequence; other tasks are pieces of a surplus.
    """

    batch: jax.Array  # the sequence's index
    split: jax.Array  # the program's index in the sequence; -1 for a piece, which adds no sink
    first: jax.Array  # the first tile
    stride: Any  # from one tile to the next; an int where it is static
    end: jax.Array  # the tile after the last
    slot: jax.Array  # where the task's partial result is stored
    first_piece: jax.Array  # the slot of the sequence's first piece, or -1 if it has no surplus
    stores_first: Any  # whether this task is the one that stores `first_piece`
    stores_last: Any  # whether it stores its slot as the sequence's last piece; False if static
    is_piece: bool = False  # whether the task is statically known to be a piece
    is_whole: Any = False  # whether the sequence has no surplus


class Pieces(NamedTuple):
    """The pieces for one program: a range of the surplus of all sequences, laid end to end."""

    sequences: jax.Array  # how many sequences the range overlaps, with one piece each
    begin: jax.Array  # tiles from the start of the surplus
    end: jax.Array


def most_tiles(tiles: int) -> int:
    """The limit of a program's tiles if the mean is `tiles`."""
    return tiles + tiles // SLACK + 1


class Balance:
    """Assigns tiles to programs; inside a kernel.

    starts_ref, counts_ref: references int32 [batch], as in Span.
    tiles_of: returns the numbers of tiles for starts and counts, all int32 [sequences].
    splits: the number of programs that share a sequence's tiles.
    own: the number of all programs of a sequence, including those of its residual.
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
        # At least a warp's number of lanes: Triton would hold copies of fewer elements in several
        # lanes, which made KV2 an eighth slower.
        self.lane = jnp.arange(max(WARP, pl.next_power_of_2(self.sequences)))
        mask = self.lane < self.sequences
        starts, counts = (
            load(x.at[self.lane], mask=mask, other=0) for x in (starts_ref, counts_ref)
        )
        tiles = jnp.where(mask, tiles_of(starts, counts), 0)
        mean = pl.cdiv(tiles.sum(), self.sequences * splits)  # tiles of a program
        self.most = mean + jax.lax.div(mean, jnp.int32(SLACK)) + 1
        each = pl.cdiv(tiles, splits)
        self.surplus = jnp.maximum(tiles - splits * self.most, 0)
        # Only programs with at most the mean have room. In total it suffices for the whole surplus:
        # the slack compensates for rounding up `each`.
        self.room = jnp.where(mask & (each <= mean), self.most - each, 0)  # tiles per program

    def pieces(self, batch: jax.Array, split: jax.Array) -> Pieces:
        """The pieces for program `split` of sequence `batch`.

        Branches of a `cond` must return computed values, since Pallas gives Triton no constants
        there: hence a zero that is a product.
        """
        total = self.surplus.sum()

        def find() -> Pieces:
            room = self._of(batch, self.room)
            begin = self._before(batch, self.room * self.splits) + split * room
            end = jnp.minimum(begin + room, total)
            behind = jnp.cumsum(self.surplus)
            is_mine = (self.surplus > 0) & (behind - self.surplus < end) & (begin < behind)
            count = is_mine.astype(jnp.int32).sum()
            return Pieces(jnp.where(begin < end, count, 0), begin, end)

        def find_none() -> Pieces:
            return Pieces(total * 0, total, total)

        return jax.lax.cond((total > 0) & (split < self.splits), find, find_none)

    def own_task(self, batch: jax.Array, split: jax.Array) -> Task:
        """The task of program `split` in its own sequence, `batch`."""
        is_whole = self._of(batch, self.surplus) == 0
        end, slot = self.splits * self.most, batch * self.own + split
        stores = jnp.int32(-1), is_whole & (split == 0), False
        return Task(batch, split, split, self.splits, end, slot, *stores, is_whole=is_whole)

    def piece(
        self, batch: jax.Array, split: jax.Array, begin: jax.Array, end: jax.Array
    ) -> tuple[Task, jax.Array]:
        """The piece that begins at position `begin` of the surplus, and the position of its end.

        A piece is the overlap of one sequence's surplus with a program's range of the whole
        surplus.

        batch, split: the program that gets the piece. end: the end of the program's range.
        """
        ends = jnp.cumsum(self.surplus)
        mine = (ends - self.surplus <= begin) & (begin < ends)
        whose = jnp.where(mine, self.lane, 0).sum()
        behind = self._of(whose, ends)
        before = behind - self._of(whose, self.surplus)
        first = self.splits * self.most + begin - before
        end = jnp.minimum(end, behind)
        # Slots of pieces are numbered in the order of the surplus: from one piece to the next,
        # either the program or the sequence advances by one.
        helpers = self._before(batch, jnp.where(self.room > 0, self.splits, 0)) + split
        number = helpers + self._before(whose, jnp.where(self.surplus > 0, 1, 0))
        slot = self.sequences * self.own + number
        stores = slot, begin == before, end == behind
        stop = first + end - begin
        return Task(whose, jnp.int32(-1), first, 1, stop, slot, *stores, is_piece=True), end

    def any_task(
        self,
        number: jax.Array,
        batch: jax.Array,
        split: jax.Array,
        begin: jax.Array,
        end: jax.Array,
    ) -> tuple[Task, jax.Array]:
        """A program's own task if `number` is 0, else a piece; and where the next piece begins.

        begin, end: the rest of the program's range of the surplus.
        """
        is_own, own = number == 0, self.own_task(batch, split)
        piece, behind = self.piece(batch, split, begin, end)
        fields: dict[str, Any] = {
            name: jnp.where(is_own, getattr(own, name), getattr(piece, name))
            for name in ("batch", "split", "first", "end", "slot", "first_piece", "stores_first")
        }
        # Computed, since Pallas gives a choice between two constants a one-bit type.
        fields["stride"] = 1 + is_own.astype(jnp.int32) * (self.splits - 1)
        fields["stores_last"] = ~is_own & piece.stores_last
        fields["is_whole"] = is_own & own.is_whole
        return Task(**fields), jnp.where(is_own, begin, behind)

    def store_pieces(self, task: Task, partials: Partials, *, mask: jax.Array) -> None:
        """Stores the slots of a sequence's first and last piece with the partial results.

        mask: whether this program stores, which one of all programs with the same tiles does.
            Stores are masked, since a branch that is the same for all pieces would make the
            compiler copy the whole loop over pieces.
        """

        def store_one(ref: Any, slot: jax.Array, stores: jax.Array) -> None:
            target = ref.at[task.batch + jnp.arange(1)]
            store(target, jnp.full(1, slot), mask=jnp.full(1, stores & mask))

        store_one(partials.first_pieces, task.first_piece, task.stores_first)
        if task.stores_last is not False:
            store_one(partials.last_pieces, task.slot, task.stores_last)

    def _of(self, sequence: jax.Array, x: jax.Array) -> jax.Array:
        """The element of x [sequences] that belongs to a sequence."""
        return jnp.where(self.lane == sequence, x, 0).sum()

    def _before(self, sequence: jax.Array, x: jax.Array) -> jax.Array:
        """The sum of x [sequences] over all sequences before this one."""
        return jnp.where(self.lane < sequence, x, 0).sum()


def slots(batch: int, own: int, splits: int) -> int:
    """The number of slots for partial results: of own tasks and, after them, of pieces.

    A piece ends at the end of a program's room or of a sequence's surplus. So there are at most as
    many pieces as there are sequences and programs that share tiles.
    """
    return batch * (own + splits + 1)
