"""Creates the state of an engine on the device: a State with a row for each slot."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpjax.engine.histories import create_histories
from mpjax.engine.sizes import MOST_STOP_IDS
from mpjax.generation.speculation.proposer import Proposer
from mpjax.generation.state import State
from mpjax.language_model import LanguageModel
from mpjax.models.state import DecoderCache
from mpjax.sampling.settings import RowSettings, Sampling


def default_settings(rows: int, stop_ids: int = MOST_STOP_IDS) -> RowSettings:
    """Settings of greedy rows with one new token, with all fields, as NumPy arrays."""
    return RowSettings.of([Sampling()], rows, max_new_tokens=1).filled(stop_ids)


def create_state(
    lm: LanguageModel,
    slots: int,
    pages: tuple[int, ...],
    max_tokens: int,
    proposer: Proposer | None = None,
    stop_ids: int = MOST_STOP_IDS,
    snapshots: int = 0,
) -> State:
    """The state of an engine without requests.

    pages: number of pages of each group of layers. max_tokens: the most tokens of a row. stop_ids:
    the most stop ids of a row. snapshots: as in Sizes.
    """
    numbers = functools.partial(jnp.zeros, dtype=jnp.int32)
    entries = -(-max_tokens // lm.page_size)
    cache = DecoderCache(
        lm.model.create_states(pages, slots, lm.kv_format, lm.page_size, snapshots),
        tuple(numbers((slots, entries)) for _ in pages),
        numbers(slots),
        lm.kv_format,
        lm.page_size,
        rotary_lengths=None if lm.config.scaling_by_length is None else numbers(slots),
    )
    return State(
        cache,
        newest=numbers(slots),
        counts=numbers(slots),
        running=jnp.zeros(slots, bool),
        settings=jax.tree.map(jnp.asarray, default_settings(slots, stop_ids)),
        speculation=create_histories(proposer, slots, entries * lm.page_size),
    )


def committed(tree: Any, mesh: Mesh | None = None) -> Any:
    """The arrays of a tree, committed to the devices that they are on; nothing is copied.

    mesh: the mesh of a divided model, over which uncommitted arrays are replicated.

    `jit` compiles a program again if an argument is committed that was not before. A trainer's
    arrays are committed. So all arrays of an engine are, and new weights recompile nothing.
    """
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def put(array: jax.Array) -> jax.Array:
        if array.committed:
            return array
        if whole is None or whole.is_fully_addressable:
            return jax.device_put(array, whole or array.sharding)
        # `device_put` would wait for all processes, to compare their arrays.
        own = np.asarray(array)
        return jax.make_array_from_callback(own.shape, whole, lambda index: own[index])

    return jax.tree.map(put, tree)


def places(state: State) -> tuple[int, int]:
    """The number of slots, and the width of block tables."""
    return len(state.counts), max((table.shape[1] for table in state.cache.tables), default=1)


def cache_bytes(lm: LanguageModel, slots: int) -> tuple[list[int], int]:
    """The bytes on each device of a page of each group of layers, and of the unpaged state."""
    one = (1,) * len(lm.config.page_groups)
    least = _bytes_of(lm, one, slots)
    more = [(*one[:group], 2, *one[group + 1 :]) for group in range(len(one))]
    each = [_bytes_of(lm, pages, slots) - least for pages in more]
    return each, least - sum(each)


def snapshot_bytes(lm: LanguageModel) -> int:
    """The bytes on each device of a sequence's recurrent states; 0 without recurrent layers."""
    one = (1,) * len(lm.config.page_groups)
    return _bytes_of(lm, one, 1, snapshots=1) - _bytes_of(lm, one, 1)


def _bytes_of(lm: LanguageModel, pages: tuple[int, ...], slots: int, snapshots: int = 0) -> int:
    room = pages, slots, lm.kv_format, lm.page_size, snapshots
    create = functools.partial(lm.model.create_states, *room)
    shapes = jax.tree.leaves(jax.eval_shape(create))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes) // lm.devices
