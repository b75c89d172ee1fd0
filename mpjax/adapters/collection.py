"""Adapters: the loaded adapters of a language model, stacked for batched use."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.adapters.sites import require_runnable
from mpjax.kernels.checks import require_type, shown, whole_number
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank
from mpjax.text.tokenizer import Tokenizer

RANK_UNIT = 8  # ranks are rounded up to a multiple of it
MERGE = "fold it into the base with mpjax.merge(lm, mpjax.read_adapter(folder, lm.model))"
_numbers = itertools.count(1)  # ids of adapters loaded by this process


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter in host memory.

    changes: LowRank changes of linear maps and tables, by path, as float32 NumPy arrays without an
        axis of adapters. arrays: whole parameters that replace the base's, such as norms and tables
        with added tokens, by path. tokenizer: the one with these tokens; None for the base's.
    """

    changes: Mapping[str, LowRank]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, model: Decoder) -> Adapter:
        """A copy of the adapter inside a model that `mpjax.lora` made.

        Raises ValueError for a model without one.
        """
        require_type("model", model, Decoder, hint=", such as lm.model")
        changes = {}
        for path, module in nnx.iter_modules(model):
            if isinstance(module, LowRank) and not module.is_stack:
                *parents, name = map(str, path)
                own = ".".join([*parents, name.removesuffix("adapter").rstrip("_")]).rstrip(".")
                changes[own] = module.map(lambda array: np.array(array, np.float32))
        if not changes:
            raise ValueError("the model has no adapter itself: mpjax.lora gives one that has")
        return cls(changes)


@dataclasses.dataclass(eq=False)
class Loaded:
    """A loaded adapter.

    name: the name by which requests choose it. adapter: its copy in host memory. place: its index
    in the stacks, from 1. key: its unique id in this process, which is part of the prefix-cache
    keys of pages computed with it. users: number of unfinished requests that use it. is_removed:
    whether new requests can't choose it.
    """

    name: str
    adapter: Adapter
    place: int
    key: bytes
    users: int = 0
    is_removed: bool = False


class Adapters:
    """The loaded adapters of a language model, in stacks with an entry for each.

    Adding an adapter that fits writes into the stacks without changing shapes, so no program is
    recompiled. If all places are taken, its rank is too high, or it changes other maps, new stacks
    are made, and programs are recompiled when they next run.
    """

    def __init__(self) -> None:
        self.stacks: dict[str, LowRank] = {}
        self.version = 0  # changes whenever the stacks change
        self._shapes: dict[str, LowRank] = {}  # of the undivided stacks
        self._names: dict[str, Loaded] = {}
        self._held: dict[int, Loaded] = {}  # key: place; includes removed ones in use
        self._places = self._rank = 0
        self._given_back: collections.deque[Loaded] = collections.deque()
        self._lock = threading.RLock()

    @property
    def names(self) -> list[str]:
        """The names of the adapters, in order of loading."""
        return list(self._names)

    def __getitem__(self, name: str) -> Loaded:
        """The adapter with a name. Raises ValueError, which lists the names, for a wrong one."""
        found = self._names.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._names) or "none"
            raise ValueError(f"there is no adapter {shown(name)}: the model has {known}")
        return found

    def reserve(self, places: int, rank: int) -> None:
        """Sets the least number of places and the least rank of stacks built from now on.

        Raises ValueError for numbers below 1.
        """
        self._places = max(self._places, whole_number("places", places))
        self._rank = max(self._rank, whole_number("rank", rank))

    def add(
        self, model: Decoder, adapters: Mapping[str, Adapter], *, replace: bool = False
    ) -> None:
        """Loads adapters by name.

        replace: whether to replace loaded adapters with the same names.

        Raises ValueError for a name that is taken or no text, for an adapter that can't be chosen
        for each row or changes kv_b_proj of latent attention, and for one of experts that are
        spread over devices. After an error, the adapters are unchanged.
        """
        with self._lock:
            self._settle()
            for name, adapter in adapters.items():
                self._require(name, adapter, replace=replace)
                beginning = f"the adapter {name!r} changes"
                require_runnable(model, beginning, adapter.changes, MERGE)
            old = [self._names[name] for name in adapters if name in self._names]
            before = dict(self._held)
            for each in old:
                if not each.users:
                    del self._held[each.place]
            places = (place for place in itertools.count(1) if place not in self._held)
            new = [
                Loaded(name, adapter, place, next(_numbers).to_bytes(8))
                for (name, adapter), place in zip(adapters.items(), places, strict=False)
            ]
            self._held |= {each.place: each for each in new}
            try:
                self._put(model, new)
            except BaseException:
                self._held = before
                raise
            for each in old:
                each.is_removed = True  # without users, its place is already free
            self._names |= {each.name: each for each in new}

    def would_hold(self, name: str) -> int:
        """The number of adapters after adding one named `name`, including removed ones in use."""
        with self._lock:
            self._settle()
            old = self._names.get(name)
            return len(self._held) + (old is None or old.users > 0)

    def remove(self, name: str) -> None:
        """Removes an adapter; its requests continue. Raises ValueError for an unknown name."""
        with self._lock:
            self._settle()
            found = self[name]
            del self._names[name]
            found.is_removed = True
            self._free(found)

    def take(self, name: str | None) -> Loaded | None:
        """Acquires an adapter for a request, until `give_back`; None for no adapter.

        Raises ValueError for an unknown name.
        """
        if name is None:
            return None
        with self._lock:
            self._settle()
            found = self[name]
            found.users += 1
            return found

    def give_back(self, adapter: Loaded | None) -> None:
        """Releases a request's adapter, without waiting for `add` in another thread."""
        if adapter is None:
            return
        self._given_back.append(adapter)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Processes released adapters; called under the lock."""
        while self._given_back:
            adapter = self._given_back.popleft()
            adapter.users -= 1
            self._free(adapter)

    def _free(self, adapter: Loaded) -> None:
        if adapter.is_removed and not adapter.users:
            del self._held[adapter.place]

    def _require(self, name: Any, adapter: Adapter, *, replace: bool) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name is {shown(name)}: expected a text")
        if name in self._names and not replace:
            raise ValueError(f"there is an adapter {name!r} already: remove it first")
        if adapter.arrays:
            raise ValueError(
                f"the adapter {name!r} has whole parameters ({next(iter(adapter.arrays))}), which "
                f"rows can't choose: {MERGE}"
            )

    def _put(self, model: Decoder, new: Sequence[Loaded]) -> None:
        """Writes new adapters, already in `_held`, into the stacks."""
        stacks, shapes = (
            dict(self.stacks),
            self._shapes,
        )  # a program may read the old ones meanwhile
        if any(self._needs_more(each) for each in new):
            self._places = max(self._places, _power_of_two(max(self._held)))
            paths = {path for each in self._held.values() for path in each.adapter.changes}
            stacks, shapes = {}, {}
            for path in sorted(paths):
                stack = self._build(path)
                shapes[path] = stack.map(_without_numbers)
                stacks[path] = model.place_change(path, stack)
        else:
            for each, path in itertools.product(new, stacks):
                change = _fitted(each.adapter.changes.get(path), shapes[path])
                one = model.place_change(path, change.map(lambda array: array[None], is_stack=True))
                put = functools.partial(_put_at, model.mesh, jnp.int32(each.place - 1))
                stacks[path] = jax.tree.map(put, stacks[path], one)
        self.stacks, self._shapes = stacks, shapes
        self.version += 1

    def _needs_more(self, new: Loaded) -> bool:
        """Whether an adapter needs new stacks."""
        for path, change in new.adapter.changes.items():
            stack = self._shapes.get(path)
            if stack is None or len(stack.down.get_value()) < new.place:
                return True
            is_less = bool(stack.ups) and (not change.ups or change.rank > stack.rank)
            if is_less or (stack.gain is None and change.gain is not None):
                return True
        return new.place > self._places

    def _build(self, path: str) -> LowRank:
        """The stack of all held adapters' changes at a path, as NumPy arrays."""
        held = {place: each.adapter.changes.get(path) for place, each in self._held.items()}
        changes = {place: change for place, change in held.items() if change is not None}
        rank = max(self._rank, *(change.rank for change in changes.values()))
        stack = _empty(list(changes.values()), self._places, -(-rank // RANK_UNIT) * RANK_UNIT)
        for place, change in changes.items():
            one = _fitted(change, stack)
            for target, source in zip(jax.tree.leaves(stack), jax.tree.leaves(one), strict=True):
                target[place - 1] = source
        return stack


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _empty(changes: Sequence[LowRank], places: int, rank: int) -> LowRank:
    """A stack of zeros for changes of one group of maps, of `rank`, or full if one of them is."""
    down, ups, _ = changes[0].arrays
    outputs, axes = changes[0].outputs, (places, *down.shape[:-1])
    has_gain = any(change.gain is not None for change in changes)
    gain = np.zeros((places, outputs), np.float32) if has_gain else None
    if not all(change.ups for change in changes):
        return LowRank(np.zeros((*axes, outputs), np.float32), (), gain, is_stack=True)
    new = [np.zeros((*axes[:-1], rank, up.shape[-1]), np.float32) for up in ups]
    down = np.zeros((*axes, rank * len(ups)), np.float32)
    return LowRank(down, new, gain, is_stack=True)


def _fitted(change: LowRank | None, stack: LowRank) -> LowRank:
    """A change zero-padded to the shapes of a stack's entries; zeros for None."""
    target = stack.map(lambda array: np.zeros(array.shape[1:], np.float32), is_stack=False)
    if change is None:
        return target
    down, ups, gain = change.arrays
    new, new_ups, new_gain = target.arrays
    if not new_ups:
        halves = np.split(down, len(ups), -1) if ups else [down]
        full = [half @ up for half, up in zip(halves, ups, strict=True)] if ups else halves
        new[...] = np.concatenate(full, -1)
    else:
        apart = new.reshape(*new.shape[:-1], len(new_ups), -1)
        apart[..., : change.rank] = down.reshape(*apart.shape[:-1], change.rank)
        for one, up in zip(new_ups, ups, strict=True):
            one[..., : change.rank, :] = up
    if gain is not None and new_gain is not None:
        new_gain[...] = gain
    return target


def _without_numbers(array: np.ndarray) -> np.ndarray:
    """An array of zeros of the same shape that takes no memory."""
    return np.broadcast_to(np.float32(0), array.shape)


@functools.partial(jax.jit, static_argnums=0)
def _put_at(
    mesh: jax.sharding.Mesh | None, entry: jax.Array, stack: jax.Array, one: jax.Array
) -> jax.Array:
    """A new stack [places, ...] in which `one` [1, ...] replaces an entry, on each device.

    The old one is not donated: a program may read it.
    """

    def put(entry: jax.Array, stack: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, one[0].astype(stack.dtype), entry, 0)

    if mesh is None:
        return put(entry, stack, one)
    whole, shares = jax.P(), jax.P(*mesh.axis_names)
    run = jax.shard_map(put, mesh=mesh, in_specs=(whole, shares, shares), out_specs=shares)
    return run(entry, stack, one)
