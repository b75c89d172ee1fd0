"""Engines for one call, with rounded sizes, so that similar calls share compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from mpjax.constraints.automaton import SMALL_STATES
from mpjax.engine.engine import CHUNK_UNIT, SEQUENCES, Engine
from mpjax.engine.histories import require_fit, state_bytes
from mpjax.engine.memory import most_pages, needed_bytes
from mpjax.engine.sizes import LEAST_TOKENS, Sizes
from mpjax.generation.buckets import bucket_rows, bucket_tokens
from mpjax.generation.speculation.proposer import Proposer
from mpjax.kernels import device
from mpjax.language_model import LanguageModel
from mpjax.memory import has_free_on, require_free_on
from mpjax.sampling.processors import Processor

STEPS = 8  # decoding steps of a program; the host reads their tokens while the next program runs
CHUNK, CHUNK_ON_CPU = 4096, 1024  # the largest prefill chunk, in tokens
SCORING_BYTES = 512 << 20  # float32 logits of a program that scores prompts


def temporary_engine(
    lm: LanguageModel,
    lengths: Sequence[int],
    new_tokens: int,
    *,
    stop_ids: int = 0,
    speculate: Proposer | None = None,
    processors: tuple[Processor, ...] = (),
    constrained: bool = False,
) -> Engine:
    """An engine that runs prompts of the given lengths at once, without scoring.

    lengths: tokens of each prompt. new_tokens, stop_ids: the most of a prompt. processors: logits
    processors that prompts may use. constrained: whether any prompt has a constraint.

    The number of prompts, the longest prompt and new_tokens are rounded up as `buckets` says. If
    memory is insufficient for the rounded number of slots, there are as many slots as prompts.

    Raises ValueError for a proposer that an engine can't use, and DeviceMemoryError, before
    anything is allocated, if cache and activations are too large.
    """
    longest = max(lengths)
    proposer = require_fit(speculate, lm, longest + new_tokens - 1)
    room = bucket_tokens(longest) + bucket_tokens(new_tokens)
    slots = bucket_rows(len(lengths))
    sizes = _reading_sizes(lm, slots, bucket_tokens(longest), most_chunk())
    sizes = dataclasses.replace(
        sizes,
        steps=min(STEPS, lm.page_size),
        proposed=0 if proposer is None else proposer.k,
        stop_ids=stop_ids,
        scores=False,
        table_states=SMALL_STATES if constrained else 0,
    )
    return _fitting(lm, sizes, room, len(lengths), proposer, processors)


def scoring_engine(lm: LanguageModel, slots: int, longest: int) -> Engine:
    """An engine for requests that only score prompts of up to `longest` tokens.

    A prefill program has as many tokens as SCORING_BYTES allow; on a CPU at least LEAST_TOKENS of
    each slot. Errors: as for `temporary_engine`.
    """
    fitting = SCORING_BYTES // (4 * lm.config.vocab_size)
    fitting = max(CHUNK_UNIT, 1 << max(fitting, 1).bit_length() - 1)
    room = bucket_tokens(longest)
    sizes = _reading_sizes(lm, slots, room, min(fitting, most_chunk()))
    return _fitting(lm, sizes, room, slots, None)


def _reading_sizes(lm: LanguageModel, slots: int, longest: int, most: int) -> Sizes:
    """Sizes with the prefill chunk, of up to `most` tokens."""
    block = lm.kv_format.block
    # A prefill program has at most one block of a prompt.
    piece = longest if block is None else min(longest, block)
    sizes = Sizes(slots, (), lm.page_size, lm.config.page_groups, block)
    if not device.on_gpu():
        width = min(piece, max(LEAST_TOKENS, most // slots))
        return dataclasses.replace(sizes, chunk=slots * width, width=width)
    programs = -(-slots * piece // most)
    chunk = min(slots * piece, -(-slots * piece // programs // CHUNK_UNIT) * CHUNK_UNIT)
    return dataclasses.replace(sizes, chunk=chunk)


def most_chunk() -> int:
    """The largest prefill chunk, in tokens, for the current device."""
    return CHUNK if device.on_gpu() else CHUNK_ON_CPU


def _fitting(
    lm: LanguageModel,
    sizes: Sizes,
    room: int,
    rows: int,
    proposer: Proposer | None,
    processors: tuple[Processor, ...] = (),
) -> Engine:
    """An engine with `room` tokens for each slot. rows: the fewest slots."""
    most = max(2, min(room, lm.config.max_position_embeddings))
    sizes = dataclasses.replace(
        sizes,
        max_gap=math.inf,
        fine=not device.on_gpu(),
        single=True,
    )

    @functools.cache
    def needed(slots: int) -> int:
        beside = state_bytes(proposer, slots, most)
        return needed_bytes(lm, dataclasses.replace(sizes, slots=slots), most, beside)

    slots = sizes.slots if has_free_on(lm.model.mesh, needed(sizes.slots)) else rows
    what = f"a {lm.kv_format} cache for {slots} × {most} tokens, with prefill,"
    require_free_on(lm.model.mesh, needed(slots), what)
    # Padded pieces form a batch of all slots.
    sequences = min(slots, SEQUENCES) if sizes.width is None else slots
    sizes = dataclasses.replace(sizes, slots=slots, sequences=sequences)
    pages = tuple(most_pages(sizes, most, window) + 1 for window in sizes.windows)
    sizes = dataclasses.replace(sizes, pages=pages)
    return Engine.of_sizes(lm, sizes, most, proposer, processors)
