"""Perplexity of a model on text, read through the KV cache so that the cache's format counts."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from mpjax.arguments import read_text, require_documents, require_known_ids
from mpjax.finite import NotFiniteError
from mpjax.kernels import PagedKVCache, files
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.memory import require_free
from mpjax.models import Decoder
from mpjax.sampling import logprobs
from mpjax.tokenizer import Tokenizer

DEFAULT_WINDOW = 1024
MAXIMUM_CHUNK = 128
# Logits of a chunk are float32 [batch, chunk, vocabulary]; large vocabularies get shorter chunks.
LOGITS_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text.

    perplexity: exp of nats_per_token, the mean of −ln p over `tokens` predicted tokens.
    bits_per_byte: their sum of −log2 p over the UTF-8 bytes of the text, which compares models of
        different tokenizers.
    window: how many tokens a prediction could see.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float
    tokens: int
    window: int


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """How a model predicts each token of a sequence but the first, from those before it.

    An empty sequence has none, as one of a single token.

    logprobs: float32 [tokens − 1], natural logarithms. greedy: bool [tokens − 1], whether the token
    is the most likely one.
    """

    logprobs: np.ndarray
    greedy: np.ndarray


def evaluate(
    lm: LanguageModel,
    documents: Iterable[str],
    *,
    window: int | None = None,
    batch: int = 8,
    progress: bool | None = None,
) -> Evaluation:
    """Predicts each token of the documents from those before it, as decoding would.

    Every token is appended to a paged cache in `lm.kv_format` and attends the cache, itself
    included, exactly as in a decoding step; so rounding of keys and values shows. Documents do not
    see each other. A document begins with the bos token, or where the tokenizer has none its eos
    token, which is not predicted itself; without either its first token isn't predicted. The end of
    a document isn't predicted. A document longer than a window is cut: each window starts with an
    empty context, and with the last token of the one before, so that every token is predicted once.

    window: tokens that a prediction can see; 1024 by default, or the model's longest context.
    batch: windows that are read at a time.
    progress: whether to show a bar on stderr; by default where stderr is a terminal.

    Raises ValueError for a model without a tokenizer, documents that are no list or without a token
    to predict, or a window that the model can't see; mpjax.finite.NotFiniteError, a ValueError, for
    a model that computes NaN or infinite logits; DeviceMemoryError, before anything is
    allocated, where the cache and the logits are too large.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    require_documents(documents)
    tokenizer = lm.require_tokenizer()
    positions = lm.config.max_position_embeddings
    window = min(DEFAULT_WINDOW, positions) if window is None else whole_number("window", window)
    batch = whole_number("batch", batch)
    if window > positions:
        raise ValueError(
            f"window is {window}; expected one that fits into the {positions} positions of this "
            "model"
        )
    documents = list(documents)
    windows = [
        piece for text in documents for piece in _windows(document_tokens(tokenizer, text), window)
    ]
    tokens = sum(len(piece) - 1 for piece in windows)
    if not tokens:
        raise ValueError("there is no token to predict: the documents are empty")
    scores = token_scores(lm, windows, batch=batch, progress=progress, kind="window")
    nats = -math.fsum(np.sum(found.logprobs, dtype=np.float64) for found in scores)
    characters = sum(len(text.encode()) for text in documents)
    return Evaluation(
        perplexity=math.exp(nats / tokens),
        nats_per_token=nats / tokens,
        bits_per_byte=nats / math.log(2) / characters,
        tokens=tokens,
        window=window,
    )


def read_held_out(path: str | os.PathLike[str]) -> list[str]:
    """The texts of a file with one JSON object per line, each with a "text".

    Raises ValueError, naming file and line, for a line of another form or encoding.
    """
    texts = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        text = files.parse_object(line, where, ValueError).get("text")
        if not isinstance(text, str):
            raise ValueError(f'{where} has the "text" {text!r:.40}: expected a string')
        texts.append(text)
    return texts


def document_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a document, behind the token that begins one."""
    ids = tokenizer.encode(text)
    start = tokenizer.bos_id
    if start is None:
        start = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    # Some checkpoints' tokenizers write the bos token themselves.
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def _windows(ids: Sequence[int], window: int) -> Iterator[np.ndarray]:
    """The ids in pieces of `window` and the token that the last of them predicts."""
    for begin in range(0, len(ids) - 1, window):
        yield np.asarray(ids[begin : begin + window + 1], np.int32)


def token_scores(
    lm: LanguageModel,
    sequences: Sequence[np.ndarray],
    *,
    batch: int = 8,
    progress: bool | None = None,
    kind: str = "sequence",
) -> list[TokenScores]:
    """Predicts each token of the sequences but the first, as `evaluate` does each window's.

    sequences: int [tokens] each, with at most one token more than the model has positions. They
        may come in any order; those of near lengths share a batch.
    batch, progress: as for `evaluate`. kind: what errors call a sequence.

    Raises ValueError for tokens that the model doesn't know; NotFiniteError and DeviceMemoryError
    as `evaluate`.
    """
    if not sequences:
        return []
    require_known_ids(sequences, lm.config.vocab_size)
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batch = min(batch, len(order))
    fitting = LOGITS_BYTES // (batch * lm.config.vocab_size * 4)
    chunk = min(MAXIMUM_CHUNK, 1 << max(fitting, 1).bit_length() - 1)
    longest = max(len(sequences[order[0]]) - 1, 1)
    capacity = -(-longest // chunk) * chunk
    create = functools.partial(
        lm.model.create_cache, batch, capacity, lm.kv_format, lm.page_size
    )  # one for all batches: what an earlier one left there is not visible
    shapes = jax.tree.leaves(jax.eval_shape(create))
    needed = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    needed += batch * chunk * lm.config.vocab_size * 4
    require_free(needed, f"reading {batch} windows of {capacity} tokens with {lm.kv_format}")
    cache = create()
    scores: dict[int, TokenScores] = {}
    console = rich.console.Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    with rich.progress.Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("Reading", total=sum(max(len(ids) - 1, 0) for ids in sequences))
        for first in range(0, len(order), batch):
            group = order[first : first + batch]
            padded = np.zeros((batch, capacity + 1), np.int32)
            counts = np.zeros(batch, np.int32)
            for row, index in enumerate(group):
                counts[row] = max(len(sequences[index]) - 1, 0)
                padded[row, : len(sequences[index])] = sequences[index]
            cache = dataclasses.replace(cache, lengths=jnp.zeros(batch, jnp.int32))
            parts = []
            for begin in range(0, max(int(counts.max()), 1), chunk):  # also where none has a target
                tokens = padded[:, begin : begin + chunk + 1]
                real = np.clip(counts - begin, 0, chunk)
                part, cache = _score(lm.model, tokens, real, cache)
                parts.append(part)
            chances, greedy = (
                np.concatenate(arrays, 1) for arrays in zip(*jax.device_get(parts), strict=True)
            )
            for row, index in enumerate(group):
                end = counts[row]  # padding follows
                scores[index] = TokenScores(chances[row, :end], greedy[row, :end])
                if np.isnan(chances[row, :end]).any():
                    raise NotFiniteError(kind, index, lm.config.dtype)
            bar.advance(task, int(counts.sum()))
    return [scores[index] for index in range(len(sequences))]


@functools.partial(jax.jit, donate_argnames="cache")
def _score(
    model: Decoder, tokens: jax.Array, counts: jax.Array, cache: PagedKVCache
) -> tuple[tuple[jax.Array, jax.Array], PagedKVCache]:
    """For tokens[:, 1:]: log-probabilities float32 and whether likeliest, [batch, chunk]; cache."""
    logits, cache = model.step(tokens[:, :-1], counts, cache, every_position=True)
    targets = tokens[:, 1:]
    return (logprobs(logits, targets), logits.argmax(-1) == targets), cache
