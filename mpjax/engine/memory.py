"""How many pages an engine has: by the memory that it may take."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax.numpy as jnp

from mpjax.engine.sizes import Sizes, scored_chunk
from mpjax.engine.state import page_bytes, residual_bytes
from mpjax.kernels import device
from mpjax.language_model import LanguageModel
from mpjax.memory import free_bytes_on, require_free_on

# Shares of the free memory. A CPU shares its memory with other processes.
USUAL_SHARE, USUAL_SHARE_ON_CPU = 0.9, 0.1


def count_pages(
    lm: LanguageModel, sizes: Sizes, max_tokens: int, memory: Any, beside: int = 0
) -> int:
    """The number of pages of an engine's cache, with the one that is nowhere.

    sizes: of the engine, whose pages are not known yet. max_tokens: the most tokens of a request.
    memory: bytes on each device, or a share of what is free, between 0 and 1, or None for
        the usual share; room for what programs compute is left free. There are never more pages
        than all slots can fill. beside: bytes that the cache has to hold besides.

    Raises ValueError for another kind of memory, and for one that does not hold a page;
    DeviceMemoryError for more bytes than are free.
    """
    slots = sizes.slots
    useful = slots * -(-max_tokens // lm.page_size)
    fixed = residual_bytes(lm, slots) + slots * lm.config.vocab_size + beside
    each = page_bytes(lm)
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, numbers.Real)):
        raise ValueError(f"cache_memory is {memory!r}: expected bytes, or a share between 0 and 1")
    usual = USUAL_SHARE if device.on_gpu() else USUAL_SHARE_ON_CPU
    share = usual if memory is None else float(memory)
    if 1 < share < math.inf:
        pages = min(useful, int(share - fixed) // each)
        needed = (fixed + pages * each) * lm.devices
        require_free_on(lm.model.mesh, needed, "the engine's cache")
    elif 0 < share <= 1:
        free = free_bytes_on(lm.model.mesh)
        most = fixed + useful * each
        room = most if free is None else share * (free - _working_bytes(lm, sizes))
        pages = min(useful, int(room - fixed) // each)
    else:
        raise ValueError(f"cache_memory is {memory!r}: expected bytes, or a share between 0 and 1")
    if pages < 1:
        given = "too little memory is free" if memory is None else f"cache_memory is {memory!r}"
        raise ValueError(
            f"{given}: a page of {lm.page_size} tokens takes {each} bytes, and "
            f"{slots} slots {fixed} bytes besides: give it more, or fewer slots"
        )
    return pages + 1


def _working_bytes(lm: LanguageModel, sizes: Sizes) -> int:
    """Bytes of a layer's widest activations, inside the MLP, and of logits, in any program.

    A program reads a chunk of prompts beside all rows that ride along, or all rows decode, each
    with the tokens that are proposed to it. Logits are those of rows that draw, of tokens that are
    verified, or of prompts that are scored.
    """
    config, riders = lm.config, sizes.slots if sizes.rides else 0
    verified = sizes.slots * (1 + sizes.proposed)
    tokens = max(sizes.chunk + riders, verified)
    inside = max(layer.mlp.working_bytes(config, tokens) for layer in config.layers)
    residual = 3 * tokens * config.hidden_size * jnp.dtype(config.dtype).itemsize
    rows = max(sizes.sequences + riders, verified, scored_chunk(sizes.chunk))
    return inside + residual + 3 * 4 * rows * config.vocab_size
