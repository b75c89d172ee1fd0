"""Measures a model's perplexity, with keys and values read from the cache in its KV format."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from mpjax import windows
from mpjax.arguments import read_text, require_documents
from mpjax.finite import NotFiniteError
from mpjax.kernels import files
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.reading import Caches, read
from mpjax.sampling import logprobs
from mpjax.windows import Cut

DEFAULT_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measures of how well a model predicts texts.

    nats_per_token: mean of −ln p over `tokens` predicted tokens. perplexity: its exponential.
    bits_per_byte: sum of −log2 p over the number of UTF-8 bytes of the texts, or, where these are
        joined, of the predicted tokens; comparable between models with different tokenizers.
    window: the most tokens that a window has, or a prediction depends on where documents are apart.
    stride: the tokens between the beginnings of windows of joined documents; None where each
        document is read on its own.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float
    tokens: int
    window: int
    stride: int | None = None


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
    stride: int | None = None,
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
    stride: joins the documents by empty lines and cuts them into windows of `window` tokens, each
        `stride` tokens after the one before (`mpjax.windows.joined`). With `stride=window` this is
        the perplexity of papers on quantisation, whose window is 2048.
    batch: number of windows that are read together.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.

    Raises ValueError for a model without a tokenizer, anything but a list of texts, documents
    without a token to predict, a window above the model's positions, and a stride above the window;
    mpjax.finite.NotFiniteError, a ValueError, for NaN or infinite logits;
    mpjax.memory.DeviceMemoryError, before anything is allocated, where the cache and the logits are
    too large.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    batch = whole_number("batch", batch)
    found = cut(lm, documents, window, stride)
    sequences = [piece.tokens for piece in found.windows]
    scores = token_scores(lm, sequences, batch=batch, progress=progress, kind="window")
    return summarise([score.logprobs for score in scores], found)


def read_window(lm: LanguageModel, window: int | None) -> int:
    """A window that a model can have, or the default. Raises ValueError for a larger one."""
    positions = lm.config.max_position_embeddings
    window = min(DEFAULT_WINDOW, positions) if window is None else whole_number("window", window)
    if window > positions:
        raise ValueError(
            f"window is {window}: expected at most {positions}, the positions of this model"
        )
    return window


def cut(lm: LanguageModel, documents: Iterable[str], window: int | None, stride: int | None) -> Cut:
    """The windows of documents, as `evaluate` describes them. Raises ValueError as it does."""
    require_documents(documents)
    documents = list(documents)
    require_documents(documents)  # the items of an iterator, too
    tokenizer, window = lm.require_tokenizer(), read_window(lm, window)
    if stride is not None and whole_number("stride", stride) > window:
        raise ValueError(f"stride is {stride}: expected at most {window}, the window")
    if stride is None:
        pieces = windows.apart(tokenizer, documents, window)
        texts = documents
    else:
        pieces = windows.joined(tokenizer, documents, window, stride)
        texts = [tokenizer.decode(piece.tokens[piece.first :].tolist()) for piece in pieces]
    if not any(piece.predicted for piece in pieces):
        raise ValueError(
            f"documents have no token to predict in windows of {window}: expected more text, or a "
            "longer window"
        )
    return Cut(pieces, window, stride, sum(len(text.encode()) for text in texts))


def summarise(logprobs: Sequence[np.ndarray], found: Cut) -> Evaluation:
    """The measures of windows whose tokens but the first have log-probabilities [tokens − 1]."""
    tokens = sum(piece.predicted for piece in found.windows)
    nats = -math.fsum(
        np.sum(one[piece.first - 1 :], dtype=np.float64)
        for one, piece in zip(logprobs, found.windows, strict=True)
    )
    return Evaluation(
        perplexity=math.exp(nats / tokens),
        nats_per_token=nats / tokens,
        bits_per_byte=nats / math.log(2) / found.text_bytes,
        tokens=tokens,
        window=found.window,
        stride=found.stride,
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
    found = read([lm], _score, sequences, batch=batch, progress=progress)
    for index, (values, _) in enumerate(found):
        if np.isnan(values).any():
            raise NotFiniteError(kind, index, lm.config.dtype)
    return [TokenScores(*arrays) for arrays in found]


@functools.partial(jax.jit, donate_argnames="caches")
def _score(
    models: tuple[Decoder, ...], tokens: jax.Array, counts: jax.Array, caches: Caches
) -> tuple[tuple[jax.Array, ...], Caches]:
    """Log-probabilities float32, and whether a token is the most likely one; see `Score`."""
    logits, cache = models[0].step(tokens[:, :-1], counts, caches[0], every_position=True)
    targets = tokens[:, 1:]
    return (logprobs(logits, targets), logits.argmax(-1) == targets), (cache,)
