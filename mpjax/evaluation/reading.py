"""Runs several models over token sequences, each with its KV cache, and scores the logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from mpjax.arguments import require_known_ids
from mpjax.language_model import LanguageModel
from mpjax.memory import require_free_on
from mpjax.models import Decoder
from mpjax.models.state import DecoderCache

MAXIMUM_CHUNK = 128
# Logits of a chunk are float32 [batch, chunk, vocabulary] for each model; large vocabularies get
# shorter chunks.
READING_BYTES = 256 << 20

Caches = tuple[DecoderCache, ...]


class Score(Protocol):
    """Computes scores of tokens from the logits of models, as a pure function."""

    def __call__(
        self, models: tuple[Decoder, ...], tokens: Any, counts: Any, caches: Caches
    ) -> tuple[tuple[jax.Array, ...], Caches]:
        """Arrays [batch, chunk] of scores of tokens[:, 1:], and the next cache of each model.

        tokens: int32 [batch, chunk + 1]. counts: int32 [batch], the real tokens of each row.
        """


def read(
    lms: Sequence[LanguageModel],
    score: Score,
    sequences: Sequence[np.ndarray],
    *,
    batch: int = 8,
    progress: bool | None = None,
) -> list[tuple[np.ndarray, ...]]:
    """The scores of each sequence's tokens except the first: arrays [tokens − 1].

    Every token is appended to a cache in the `kv_format` of each model and attends to the cache, as
    in a decoding step. The logits of one chunk of a batch exist at a time.

    lms: models of one vocabulary. sequences: int [tokens] each, at most one token more than the
        models have positions. Sequences are batched by length; the scores are in the given order.
    batch: number of sequences in a batch. progress: whether to show a bar on stderr; by default if
        stderr is a terminal.

    Raises ValueError for token ids outside the vocabulary; mpjax.memory.DeviceMemoryError, before
    anything is allocated, if the caches and the logits are too large.
    """
    if not sequences:
        return []
    vocabulary = lms[0].config.vocab_size
    require_known_ids(sequences, vocabulary)
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batch = min(batch, len(order))
    chunk = _chunk(batch * vocabulary * 4 * len(lms))
    longest = max(len(sequences[order[0]]) - 1, 1)
    capacity = -(-longest // chunk) * chunk
    # All batches reuse these caches: lengths of zero hide an earlier batch's keys and values.
    caches = _create_caches(lms, batch, capacity, chunk)
    models = tuple(lm.for_device for lm in lms)
    found: dict[int, tuple[np.ndarray, ...]] = {}
    total = sum(max(len(ids) - 1, 0) for ids in sequences)
    with reading_bar(lms[0].precision, total, progress) as advance:
        for first in range(0, len(order), batch):
            group = order[first : first + batch]
            tokens, counts = _pad([sequences[index] for index in group], (batch, capacity + 1))
            caches = tuple(cache.begin(jnp.array(counts)) for cache in caches)
            parts = []
            # At least one chunk runs, so that there is something to concatenate.
            for begin in range(0, max(int(counts.max()), 1), chunk):
                real = np.clip(counts - begin, 0, chunk)
                part, caches = score(models, tokens[:, begin : begin + chunk + 1], real, caches)
                advance(0)
                parts.append(part)
            arrays = [np.concatenate(a, 1) for a in zip(*jax.device_get(parts), strict=True)]
            for row, index in enumerate(group):  # cuts off the scores of padding
                found[index] = tuple(array[row, : counts[row]] for array in arrays)
            advance(int(counts.sum()))
    return [found[index] for index in range(len(sequences))]


@contextlib.contextmanager
def reading_bar(name: str, tokens: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr; yields a function that advances it by a number of tokens.

    name: the bar's label. progress: whether to show the bar; by default if stderr is a terminal.
    """
    console = rich.console.Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    with rich.progress.Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(f"{name}: compiling", total=tokens)  # until the first tokens are done
        yield lambda count: bar.update(task, description=f"{name}: reading", advance=count)


def _chunk(bytes_of_token: int) -> int:
    fitting = max(READING_BYTES // bytes_of_token, 1)
    return min(MAXIMUM_CHUNK, 1 << fitting.bit_length() - 1)


def _create_caches(
    lms: Sequence[LanguageModel], batch: int, capacity: int, chunk: int
) -> tuple[DecoderCache, ...]:
    create = [
        functools.partial(lm.model.create_cache, batch, capacity, lm.kv_format, lm.page_size)
        for lm in lms
    ]
    shapes = jax.tree.leaves([jax.eval_shape(one) for one in create])
    needed = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    needed += batch * chunk * lms[0].config.vocab_size * 4 * len(lms)
    formats = " and ".join(str(lm.kv_format) for lm in lms)
    what = f"reading {batch} windows of {capacity} tokens with {formats}"
    require_free_on(lms[0].model.mesh, needed, what)
    return tuple(one() for one in create)


def _pad(sequences: Sequence[np.ndarray], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The sequences padded to `shape`, int32, and the number of predicted tokens of each row."""
    tokens, counts = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
    for row, ids in enumerate(sequences):
        counts[row] = max(len(ids) - 1, 0)
        tokens[row, : len(ids)] = ids
    return tokens, counts
