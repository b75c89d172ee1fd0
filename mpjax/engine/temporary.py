"""Engines for one call: sized for its requests, so that calls of similar sizes share programs."""

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

STEPS = 8  # decoding steps between two reads of the tokens, which the host makes while others run
CHUNK, CHUNK_ON_CPU = 4096, 1024  # the most tokens of prompts in a program
SCORING_BYTES = 512 << 20  # of a program that scores prompts, in float32


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
    """An engine in which prompts of so many tokens run at once; it scores none of them.

    new_tokens, stop_ids: the most that a prompt has of them. processors: that prompts may have.
    constrained: whether any has a constraint.

    The number of prompts, the longest prompt and new_tokens are rounded up as `buckets` says. If
    memory lacks for that many prompts, there are no more slots than prompts.

    Raises ValueError for a proposer that doesn't fit, and DeviceMemoryError, before anything is
    allocated, where the cache and what programs compute are too large.
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
    """An engine for requests that only score their prompts, of which it reads up to `longest`.

    A program reads as many tokens as SCORING_BYTES allow; on a CPU at least LEAST_TOKENS of each
    slot. Errors: as for `temporary_engine`.
    """
    fitting = SCORING_BYTES // (4 * lm.config.vocab_size)
    fitting = max(CHUNK_UNIT, 1 << max(fitting, 1).bit_length() - 1)
    room = bucket_tokens(longest)
    sizes = _reading_sizes(lm, slots, room, min(fitting, most_chunk()))
    return _fitting(lm, sizes, room, slots, None)


def _reading_sizes(lm: LanguageModel, slots: int, longest: int, most: int) -> Sizes:
    """The sizes of programs that read prompts, of up to `most` tokens together."""
    block = lm.kv_format.block
    # A program reads no more of a prompt than a block.
    piece = longest if block is None else min(longest, block)
    sizes = Sizes(slots, (), lm.page_size, lm.config.page_groups, block)
    if not device.on_gpu():
        width = min(piece, max(LEAST_TOKENS, most // slots))
        return dataclasses.replace(sizes, chunk=slots * width, width=width)
    programs = -(-slots * piece // most)
    chunk = min(slots * piece, -(-slots * piece // programs // CHUNK_UNIT) * CHUNK_UNIT)
    return dataclasses.replace(sizes, chunk=chunk)


def most_chunk() -> int:
    """The most tokens of prompts in a program."""
    return CHUNK if device.on_gpu() else CHUNK_ON_CPU


def _fitting(
    lm: LanguageModel,
    sizes: Sizes,
    room: int,
    rows: int,
    proposer: Proposer | None,
    processors: tuple[Processor, ...] = (),
) -> Engine:
    """An engine with room for so many tokens in each slot; `rows`: the slots that it needs."""
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
    # Padded pieces are of all slots.
    sequences = min(slots, SEQUENCES) if sizes.width is None else slots
    sizes = dataclasses.replace(sizes, slots=slots, sequences=sequences)
    pages = tuple(most_pages(sizes, most, window) + 1 for window in sizes.windows)
    sizes = dataclasses.replace(sizes, pages=pages)
    return Engine.of_sizes(lm, sizes, most, proposer, processors)
