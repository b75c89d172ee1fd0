"""Measures a model's perplexity, with keys and values read from the cache in its KV format."""

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
from mpjax.memory import require_free_on
from mpjax.models import Decoder
from mpjax.sampling import logprobs
from mpjax.tokenizer import Tokenizer

DEFAULT_WINDOW = 1024
MAXIMUM_CHUNK = 128
# Logits of a chunk are float32 [batch, chunk, vocabulary]; large vocabularies get shorter chunks.
LOGITS_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measures of how well a model predicts texts.

    nats_per_token: mean of −ln p over `tokens` predicted tokens. perplexity: its exponential.
    bits_per_byte: sum of −log2 p over the number of UTF-8 bytes of the texts; comparable between
        models with different tokenizers.
    window: the most tokens that a prediction depends on.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float
    tokens: int
    window: int


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Scores of all tokens of a sequence but the first, each predicted from the tokens before it.

    logprobs: float32 [tokens − 1], natural logarithms of the tokens' probabilities.
    greedy: bool [tokens − 1], whether each token is the most likely one.
    Both are empty for an empty sequence.
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
    """Predicts each token of the documents from the tokens before it; returns perplexity.

    Every token is appended to a cache in `lm.kv_format` and attends to the cache, its own key
    included, as in a decoding step, so that the rounding of keys and values counts. Each document
    is read from an empty context. It begins with the bos token, or with the eos token if the
    tokenizer has no bos; that token is not predicted. Without either, the first token is not
    predicted. The end of a document is not predicted. A document longer than a window is cut: each
    window begins with an empty context and the last token of the window before, so that every token
    is predicted once.

    documents: a list of texts.
    window: the most tokens that a prediction depends on; the smaller of 1024 and the model's
        positions by default.
    batch: number of windows that are read together.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.

    Raises ValueError for a model without a tokenizer, anything but a list of texts, documents
    without a token to predict, and a window above the model's positions;
    mpjax.finite.NotFiniteError, a ValueError, for NaN or infinite logits;
    mpjax.memory.DeviceMemoryError, before anything is allocated, where the cache and the logits are
    too large.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    require_documents(documents)
    tokenizer = lm.require_tokenizer()
    positions = lm.config.max_position_embeddings
    window = min(DEFAULT_WINDOW, positions) if window is None else whole_number("window", window)
    batch = whole_number("batch", batch)
    if window > positions:
        raise ValueError(
            f"window is {window}: expected at most {positions}, the positions of this model"
        )
    documents = list(documents)
    windows = [
        piece for text in documents for piece in _windows(document_tokens(tokenizer, text), window)
    ]
    tokens = sum(len(piece) - 1 for piece in windows)
    if not tokens:
        raise ValueError("documents have no token to predict: expected a text that is not empty")
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
    """Reads texts from a file with one JSON object per line, each with a "text".

    Raises ValueError, which names file and line, for a line of another form or encoding.
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
    """Token ids of a document, with the bos token (or the eos token without one) in front."""
    ids = tokenizer.encode(text)
    start = tokenizer.bos_id
    if start is None:
        start = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    # Some checkpoints' tokenizers add the bos token themselves.
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def _windows(ids: Sequence[int], window: int) -> Iterator[np.ndarray]:
    """Cuts ids into pieces of `window` tokens and the next one, which the last of them predicts."""
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
    """Predicts each token of the sequences but the first, through the cache as `evaluate` does.

    sequences: int [tokens] each, at most one token more than the model has positions. Sequences of
        similar lengths share a batch, whatever their order; the scores come in the given order.
    batch, progress: as for `evaluate`. kind: the word for a sequence in error messages.

    Raises ValueError for token ids that the vocabulary lacks; NotFiniteError and DeviceMemoryError
    as `evaluate` does.
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
    )  # all batches use this cache: lengths of zero hide an earlier batch's keys and values
    shapes = jax.tree.leaves(jax.eval_shape(create))
    needed = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    needed += batch * chunk * lm.config.vocab_size * 4
    what = f"reading {batch} windows of {capacity} tokens with {lm.kv_format}"
    require_free_on(lm.model.mesh, needed, what)
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
            # At least one chunk is read, so that there is something to concatenate.
            for begin in range(0, max(int(counts.max()), 1), chunk):
                tokens = padded[:, begin : begin + chunk + 1]
                real = np.clip(counts - begin, 0, chunk)
                part, cache = _score(lm.model, tokens, real, cache)
                parts.append(part)
            chances, greedy = (
                np.concatenate(arrays, 1) for arrays in zip(*jax.device_get(parts), strict=True)
            )
            for row, index in enumerate(group):
                end = counts[row]  # the scores of padding follow
                scores[index] = TokenScores(chances[row, :end], greedy[row, :end])
                if np.isnan(chances[row, :end]).any():
                    raise NotFiniteError(kind, index, lm.config.dtype)
            bar.advance(task, int(counts.sum()))
    return [scores[index] for index in range(len(sequences))]


@functools.partial(jax.jit, donate_argnames="cache")
def _score(
    model: Decoder, tokens: jax.Array, counts: jax.Array, cache: PagedKVCache
) -> tuple[tuple[jax.Array, jax.Array], PagedKVCache]:
    """Scores of tokens[:, 1:] and the next cache.

    tokens: int32 [batch, chunk + 1]. counts: int32 [batch], tokens of each row that are read.
    Scores are log-probabilities float32 and whether a token is the most likely one, bool, both
    [batch, chunk].
    """
    logits, cache = model.step(tokens[:, :-1], counts, cache, every_position=True)
    targets = tokens[:, 1:]
    return (logprobs(logits, targets), logits.argmax(-1) == targets), cache
