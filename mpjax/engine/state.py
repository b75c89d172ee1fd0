"""The state of an engine on the device: one pytree, which its programs take over and return."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.engine.histories import create_histories
from mpjax.kernels import KVFormat, KVPages
from mpjax.language_model import LanguageModel
from mpjax.speculation.proposer import Proposer, Speculation

STOP_IDS = 16  # the most stop ids of a row
CANDIDATES = 20  # the most candidates of a token whose log-probabilities are told
NO_ID = np.iinfo(np.int32).max  # in the place of a stop id; no vocabulary has it
ALL = np.iinfo(np.int32).max  # a top_k that keeps all tokens


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "penalty",
        "least",
        "most",
        "stop_ids",
        "key_words",
        "candidates",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How the tokens of rows are drawn and where rows end; in each array a number for each row.

    temperature (0 is greedy), top_p (1 keeps all tokens), min_p (0 keeps all), penalty (of
        repetition; 1 changes nothing): float32. top_k (ALL keeps all tokens): int32.
    least, most: int32, new tokens before which nothing ends the row, and at which it ends.
    stop_ids: int32 [rows, STOP_IDS], tokens that end the row, and NO_ID.
    key_words: uint32 [rows, 2], of the row's key for random numbers.
    candidates: int32, how many of the likeliest tokens are told beside each token.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    least: Any
    most: Any
    stop_ids: Any
    key_words: Any
    candidates: Any

    @classmethod
    def usual(cls, rows: int) -> RowSettings:
        """Greedy rows that end at their first token, in NumPy's arrays."""
        floats = {
            name: np.full(rows, value, np.float32)
            for name, value in (("temperature", 0), ("top_p", 1), ("min_p", 0), ("penalty", 1))
        }
        return cls(
            **floats,
            top_k=np.full(rows, ALL, np.int32),
            least=np.zeros(rows, np.int32),
            most=np.ones(rows, np.int32),
            stop_ids=np.full((rows, STOP_IDS), NO_ID, np.int32),
            key_words=np.zeros((rows, 2), np.uint32),
            candidates=np.zeros(rows, np.int32),
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "layers",
        "tables",
        "lengths",
        "newest",
        "counts",
        "running",
        "seen",
        "settings",
        "speculation",
        "rotary_lengths",
    ],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class EngineState:
    """The cache and the rows of an engine, by slot.

    layers: the pages of each layer, with a residual for each slot in formats with blocks.
    tables: int32 [slots, pages per sequence], block tables. lengths: int32 [slots], tokens in the
        cache. newest: int32 [slots], the last token drawn, which is not in the cache yet.
    counts: int32 [slots], new tokens drawn. running: bool [slots], whether another may be drawn.
    seen: bool [slots, vocabulary], whether a token was read or drawn.
    settings: of the row in each slot.
    format: of the cache (static).
    speculation: the tokens of each slot's row and the state of its proposer; None without one.
    rotary_lengths: int32 [slots], as in PagedKVCache; None for models without them.
    """

    layers: tuple[KVPages, ...]
    tables: jax.Array
    lengths: jax.Array
    newest: jax.Array
    counts: jax.Array
    running: jax.Array
    seen: jax.Array
    settings: RowSettings
    format: KVFormat
    speculation: Speculation | None = None
    rotary_lengths: jax.Array | None = None

    @classmethod
    def create(
        cls,
        lm: LanguageModel,
        slots: int,
        pages: int,
        max_tokens: int,
        proposer: Proposer | None = None,
    ) -> EngineState:
        """A state without rows. max_tokens: the most tokens of a row."""
        numbers = functools.partial(jnp.zeros, dtype=jnp.int32)
        entries = -(-max_tokens // lm.page_size)
        return cls(
            layers=lm.model.create_pages(pages, slots, lm.kv_format, lm.page_size),
            tables=numbers((slots, entries)),
            lengths=numbers(slots),
            newest=numbers(slots),
            counts=numbers(slots),
            running=jnp.zeros(slots, bool),
            seen=jnp.zeros((slots, lm.model.columns), bool),
            settings=jax.tree.map(jnp.asarray, RowSettings.usual(slots)),
            format=lm.kv_format,
            speculation=create_histories(proposer, slots, entries * lm.page_size),
            rotary_lengths=None if lm.config.scaling_by_length is None else numbers(slots),
        )


def page_bytes(lm: LanguageModel) -> int:
    """The bytes of one page of all layers, keys, values and their scales, on each device."""
    return _bytes_of(lm, 2) - _bytes_of(lm, 1)


def residual_bytes(lm: LanguageModel, slots: int) -> int:
    """The bytes of residuals and what else is no page, on each device."""
    return _bytes_of(lm, 1, slots) - page_bytes(lm)


def _bytes_of(lm: LanguageModel, pages: int, slots: int = 1) -> int:
    create = functools.partial(lm.model.create_pages, pages, slots, lm.kv_format, lm.page_size)
    shapes = jax.tree.leaves(jax.eval_shape(create))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes) // lm.devices
