"""Measures a model's perplexity, with a cache in the model's KV format."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpjax.arguments import read_text, require_documents, require_known_ids
from mpjax.engine.request import Options
from mpjax.engine.temporary import scoring_engine
from mpjax.errors import NotFiniteError
from mpjax.evaluation import windows
from mpjax.evaluation.reading import reading_bar
from mpjax.evaluation.windows import Cut
from mpjax.kernels import files
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.sampling.settings import Sampling

DEFAULT_WINDOW = 1024


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts texts.

    nats_per_token: mean of −ln p over `tokens` predicted tokens. perplexity: exp(nats_per_token).
    bits_per_byte: sum of −log2 p divided by the number of UTF-8 bytes of the texts, or, for joined
        documents, of the predicted tokens; comparable between models with different tokenizers. NaN
        if all predicted tokens are special tokens, which have no text.
    window: the most tokens in a window of joined documents; for separate documents, the most tokens
        that a prediction depends on.
    stride: the tokens between the begins of successive windows of joined documents; None for
        separate documents.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float
    tokens: int
    window: int
    stride: int | None = None


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Scores of a sequence's tokens except the first, each predicted from the tokens before it.

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
    adapter: str | None = None,
) -> Evaluation:
    """The perplexity of a model: each token of the documents is predicted from those before it.

    Every token is appended to a cache in `lm.kv_format` and attends to the cache, its own key
    included, as in a decoding step, so that the rounding of keys and values counts. Each document
    starts with an empty context and the bos token, or the eos token if the tokenizer has no bos;
    that token is not predicted. Without either, the first token is not predicted. The end of a
    document is not predicted. A document longer than a window is cut: each window starts with an
    empty context and the last token of the previous window, so that every token is predicted once.

    documents: a list of texts.
    window: the most tokens that a prediction depends on; the smaller of 1024 and the model's
        positions by default.
    stride: joins the documents by empty lines and cuts them into windows of `window` tokens, each
        `stride` tokens after the one before (`mpjax.evaluation.windows.joined`). With
        `stride=window` this is the perplexity of papers on quantisation, whose window is 2048.
    batch: number of windows in a batch.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    adapter: the name of one of the model's adapters, or None.

    Raises ValueError for a model without a tokenizer, anything but a list of texts, documents
    without a token to predict, a window above the model's positions, and a stride above the window;
    mpjax.errors.NotFiniteError, a ValueError, for NaN or infinite logits;
    mpjax.memory.DeviceMemoryError, before anything is allocated, where the cache and the logits are
    too large.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    batch = whole_number("batch", batch)
    found = cut(lm, documents, window, stride)
    sequences = [piece.tokens for piece in found.windows]
    options: dict[str, Any] = {"batch": batch, "progress": progress, "adapter": adapter}
    scores = token_scores(lm, sequences, kind="window", **options)
    return summarise([score.logprobs for score in scores], found)


def read_window(lm: LanguageModel, window: int | None) -> int:
    """The window, or the default. Raises ValueError if it exceeds the model's positions."""
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
    require_documents(documents)  # checks the items of an iterator too
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
    """The Evaluation of windows. logprobs: float [tokens − 1] of each window."""
    tokens = sum(piece.predicted for piece in found.windows)
    nats = -math.fsum(
        np.sum(one[piece.first - 1 :], dtype=np.float64)
        for one, piece in zip(logprobs, found.windows, strict=True)
    )
    return Evaluation(
        perplexity=math.exp(nats / tokens),
        nats_per_token=nats / tokens,
        bits_per_byte=nats / math.log(2) / found.text_bytes if found.text_bytes else math.nan,
        tokens=tokens,
        window=found.window,
        stride=found.stride,
    )


def read_held_out(path: str | os.PathLike[str]) -> list[str]:
    """The texts of a JSON Lines file whose objects have a "text".

    Raises ValueError, which names file and line, for a malformed line or a wrong encoding.
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
    adapter: str | None = None,
) -> list[TokenScores]:
    """Scores each token of the sequences except the first, with a cache as `evaluate` does.

    Each sequence is a request of an engine that scores its prompt and generates nothing.

    sequences: int [tokens] each, at most one token more than the model has positions. The scores
        are in the same order.
    batch, progress, adapter: as for `evaluate`. kind: the word for a sequence in error messages.

    Raises ValueError for token ids outside the vocabulary; NotFiniteError and DeviceMemoryError
    as `evaluate` does.
    """
    require_known_ids(sequences, lm.config.vocab_size)
    none = TokenScores(np.zeros(0, np.float32), np.zeros(0, bool))
    scores = [none] * len(sequences)
    # The longest sequences come first, so that the last programs are full too.
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    order = [index for index in order if len(sequences[index]) > 1]
    if not order:
        return scores
    given = Options(max_new_tokens=0, sampling=Sampling(stop_ids=()), adapter=adapter)
    options = given.read(lm, 1, scores=True)
    slots = min(batch, len(order))
    engine = scoring_engine(lm, slots, len(sequences[order[0]]) - 1)
    total = sum(len(sequences[index]) - 1 for index in order)
    broken: list[int] = []
    with engine, reading_bar(lm.precision, total, progress) as advance:
        handles = {
            engine.submit_row(sequences[index].tolist(), options, scored=True): index
            for index in order
        }
        while engine.has_work:
            for event in engine.step():
                index = handles[event.handle]
                found = event.handle.prompt_logprobs
                if found is None or np.isnan(found.logprobs).any():
                    broken.append(index)
                    continue
                scores[index] = TokenScores(found.logprobs, found.best == sequences[index][1:])
                advance(len(sequences[index]) - 1)
    if broken:
        raise NotFiniteError(kind, min(broken), lm.config.dtype)
    return scores
