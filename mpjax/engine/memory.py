"""Computes how many pages and snapshots an engine gets from its memory."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mpjax.constraints.automaton import SMALL_CLASSES
from mpjax.engine.pages import WINDOW_SLACK
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import cache_bytes, snapshot_bytes
from mpjax.kernels import device
from mpjax.language_model import LanguageModel
from mpjax.memory import free_bytes_on, require_free_on

# Shares of the free memory. A CPU shares its memory with other processes.
USUAL_SHARE, USUAL_SHARE_ON_CPU = 0.9, 0.1
PROGRAMS = 2  # prefill programs that hold pages at once: one runs while the next is planned
SNAPSHOTS = 4  # the most snapshots per slot
SNAPSHOT_SHARE = 0.25  # the most for snapshots, of the memory for pages and snapshots
# Bytes per slot and token id: whether it is allowed, how often it was drawn, and its class.
CONTROL = 7


def count_pages(
    lm: LanguageModel, sizes: Sizes, max_tokens: int, memory: Any, beside: int = 0
) -> Sizes:
    """The sizes of an engine with the pages of each group of layers, and with snapshots.

    A group with a sliding window gets at most the pages that all slots' windows and the running
    prefill chunks need; the rest of the memory goes to the other groups. Counts include the page
    NOWHERE.

    sizes: the engine's sizes, without pages and with the most snapshots, which get at most
    SNAPSHOT_SHARE of the memory. max_tokens: the most tokens of a request.
    memory: bytes on each device, a share of the free memory between 0 and 1, or None for the usual
        share; a share is of what activations leave free. There are never more pages than all slots
        can fill. beside: bytes of other state that count as cache.

    Raises ValueError for an invalid `memory` and for less than one page, DeviceMemoryError for more
    bytes than are free.
    """
    slots = sizes.slots
    each, fixed = _state_bytes(lm, sizes, beside)
    most = [most_pages(sizes, max_tokens, window) for window in sizes.windows]
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, numbers.Real)):
        raise ValueError(f"cache_memory is {memory!r}: expected bytes, or a share between 0 and 1")
    usual = USUAL_SHARE if device.on_gpu() else USUAL_SHARE_ON_CPU
    share = usual if memory is None else float(memory)
    is_share = 0 < share <= 1
    if not (is_share or 1 < share < math.inf):
        raise ValueError(f"cache_memory is {memory!r}: expected bytes, or a share between 0 and 1")
    free = free_bytes_on(lm.model.mesh) if is_share else None
    total = share if free is None else share * (free - _working_bytes(lm, sizes))
    room = sys.maxsize if is_share and free is None else int(total - fixed)
    one = snapshot_bytes(lm) if sizes.snapshots else 0
    snapshots = max(0, min(sizes.snapshots, int(SNAPSHOT_SHARE * room) // one)) if one else 0
    pages = _share_room(room - snapshots * one, each, most)
    if not is_share:
        needed = fixed + sum(map(operator.mul, pages, each)) + snapshots * one
        require_free_on(lm.model.mesh, needed * lm.devices, "the engine's cache")
    if min(pages, default=1) < 1:
        given = "too little memory is free" if memory is None else f"cache_memory is {memory!r}"
        raise ValueError(
            f"{given}: a page of {lm.page_size} tokens takes {sum(each)} bytes, and "
            f"{slots} slots {fixed} bytes besides: give it more, or fewer slots"
        )
    found = [*(count + 1 for count in pages), snapshots]
    if lm.processes > 1:  # whose machines may have less memory: arrays have equal sizes in all
        every = multihost_utils.process_allgather(np.array(found, np.int32))
        found = np.min(every, axis=0).tolist()
    *counts, snapshots = found
    return dataclasses.replace(sizes, pages=tuple(counts), snapshots=snapshots)


def most_pages(sizes: Sizes, max_tokens: int, window: int | None) -> int:
    """The most pages that a group of layers can use. max_tokens: the most tokens of a request."""
    all_slots = sizes.slots * sizes.pages_for(max_tokens)
    if window is None:
        return all_slots
    of_row = sizes.pages_for(window + WINDOW_SLACK) + 2
    # Rows keep a chunk's pages until it is known to be finite, after the next program's launch.
    of_program = sizes.pages_for(sizes.chunk) + sizes.sequences
    return min(all_slots, sizes.slots * of_row + PROGRAMS * of_program)


def _share_room(room: int, each: Sequence[int], most: Sequence[int]) -> list[int]:
    """The pages of each group that fit into `room` bytes: equal numbers, up to each group's `most`.

    each: the bytes of a page of each group.
    """
    pages = [0] * len(most)
    for _ in most:
        growing = [group for group, count in enumerate(most) if pages[group] < count]
        cost = sum(each[group] for group in growing)
        more = min((most[group] - pages[group] for group in growing), default=0)
        more = min(more, room // max(cost, 1))
        for group in growing:
            pages[group] += more
        room -= more * cost
    return pages if room >= 0 else [0] * len(most)


def needed_bytes(lm: LanguageModel, sizes: Sizes, max_tokens: int, beside: int) -> int:
    """Bytes on all devices together of an engine whose slots all hold `max_tokens` tokens.

    sizes, beside: as for `count_pages`.
    """
    pages = (most_pages(sizes, max_tokens, window) + 1 for window in sizes.windows)
    each, fixed = _state_bytes(lm, sizes, beside)
    return (fixed + sum(map(operator.mul, pages, each)) + _working_bytes(lm, sizes)) * lm.devices


def _state_bytes(lm: LanguageModel, sizes: Sizes, beside: int) -> tuple[list[int], int]:
    """Bytes on each device of a page of each group, and of an engine's state without pages."""
    each, fixed = cache_bytes(lm, sizes.slots)
    table = 2 * sizes.table_states * SMALL_CLASSES
    return each, fixed + sizes.slots * (CONTROL * lm.config.vocab_size + table) + beside


def _working_bytes(lm: LanguageModel, sizes: Sizes) -> int:
    """Bytes of the widest activations inside a sublayer, and of logits, in any program.

    A program prefills a chunk, or decodes all rows with their proposed tokens. Logits are computed
    for sampled rows, verified tokens, or scored prompts.
    """
    config = lm.config
    verified = sizes.slots * (1 + sizes.proposed)
    tokens = max(sizes.chunk, verified)
    halves = (spec for layer in config.layers for spec in layer.halves.values())
    inside = max(spec.working_bytes(config, tokens) for spec in halves)
    streams = getattr(config.in_all_layers("streams"), "count", 1)
    residual = 3 * streams * tokens * config.hidden_size * jnp.dtype(config.dtype).itemsize
    rows = max(sizes.sequences, verified, sizes.scored if sizes.scores else 0)
    return inside + residual + 3 * 4 * rows * config.vocab_size
