"""`embed` and `score`: one forward pass over each text, without a KV cache, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import positive_whole
from mpjax.checkpoint.gguf.header import is_gguf
from mpjax.embedding.pooling import Pooling
from mpjax.generation.buckets import bucket_rows, bucket_tokens
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.text.prompts import Prompts, encode, is_single

TOKENS = 8192  # the most tokens of a batch, with its padding


def embed(
    lm: LanguageModel,
    texts: Prompts,
    *,
    prompt: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> np.ndarray:
    """The embedding of each text, float32 [texts, channels]; of a single text [channels].

    Pooling and dense layers follow sentence-transformers' files in the model's folder. Without such
    files, an embedding is the normalised hidden state of the last token.

    texts: one or several texts, or token ids.
    prompt: the name of one of the folder's prompts, which is prepended to each text; by default the
        folder's default prompt, if it has one.
    normalize: whether embeddings get length 1; by default as the folder configures.
    dimensions: how many leading channels are kept, before the normalisation; by default all.

    Weights have the model's precision; activations are not rounded, and no KV cache is written.

    Raises ValueError for a text without tokens or with more tokens than the model has positions, an
    unknown prompt, and dimensions beyond the channels; CheckpointError for files that can't be
    read.
    """
    pooling = pooling_of(lm)
    found = np.stack([*_read(lm, encoded(lm, texts, pooling.before(prompt)), pooling.pool)])
    if dimensions is not None:
        if positive_whole("dimensions", dimensions) > found.shape[1]:
            raise ValueError(f"dimensions is {dimensions}: expected at most {found.shape[1]}")
        found = found[:, :dimensions]
    if pooling.normalizes if normalize is None else normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found[0] if is_single(texts) else found


def score(lm: LanguageModel, texts: Prompts, seconds: Sequence[str] | None = None) -> np.ndarray:
    """The scores of a classifier or reranker, float32 [texts, labels]; of a single text [labels].

    Scores are logits, as transformers' classifiers return: a softmax over several labels, or the
    sigmoid of a single label, gives probabilities.

    texts: one or several texts, or token ids. seconds: a second text for each, such as a document
        for a query; the tokenizer's post-processor joins each pair.

    Raises ValueError for a model that is not a classifier, for numbers of texts and seconds that
    differ, and as `embed` does.
    """
    if lm.config.labels is None:
        raise ValueError(
            f"{lm.source} is no classifier: expected an architecture such as "
            "Qwen3ForSequenceClassification; mpjax.embed gives embeddings"
        )
    if seconds is None:
        ids = encoded(lm, texts, "")
    else:
        firsts = [texts] if isinstance(texts, str) else list(texts)
        if len(firsts) != len(seconds):
            raise ValueError(f"seconds are {len(seconds)}: expected {len(firsts)}, one for a text")
        tokenizer = lm.require_tokenizer()
        ids = [tokenizer.encode(a, second=b) for a, b in zip(firsts, seconds, strict=True)]
    found = np.stack([*_read(lm, ids, Pooling().pool)])
    assert lm.model.score is not None
    labels = np.asarray(lm.model.score.get_value(), np.float32)
    return (found @ labels.T)[0] if is_single(texts) and seconds is None else found @ labels.T


def pooling_of(lm: LanguageModel) -> Pooling:
    """The pooling that the model's folder or GGUF file configures.

    Raises CheckpointError for files that can't be read.
    """
    return Pooling.of_gguf(lm.source) if is_gguf(lm.source) else Pooling.of(lm.source)


def encoded(lm: LanguageModel, texts: Prompts, before: str) -> list[list[int]]:
    """Token ids of each text. before: a prompt that is prepended to each text."""
    if isinstance(texts, str):
        texts = [texts]
    if before and not isinstance(texts, np.ndarray | jax.Array):
        texts = [before + text if isinstance(text, str) else text for text in texts]  # type: ignore
    return encode(lm.require_tokenizer(), texts, lm.config.vocab_size)


def _read(
    lm: LanguageModel,
    sequences: Sequence[Sequence[int]],
    pool: Callable[[jax.Array, jax.Array], jax.Array],
) -> Iterator[np.ndarray]:
    """The pooled hidden states of each sequence, in the order of the sequences."""
    lm.require_one_device("embedding texts with")
    most = lm.config.max_position_embeddings
    for number, ids in enumerate(sequences):
        if len(ids) > most:
            raise ValueError(f"text {number} has {len(ids)} tokens: expected at most {most}")
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    model = lm.for_device
    found: dict[int, np.ndarray] = {}
    while order:
        length = min(bucket_tokens(len(sequences[order[-1]])), most)
        group = [order.pop() for _ in range(min(len(order), max(TOKENS // length, 1)))]
        rows = bucket_rows(len(group))
        tokens, counts = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
        for row, index in enumerate(group):
            counts[row] = len(sequences[index])
            tokens[row, : counts[row]] = sequences[index]
        pooled = np.asarray(pool(_hidden(model, tokens, counts), jnp.asarray(counts)))
        found |= {index: pooled[row] for row, index in enumerate(group)}
    return (found[index] for index in range(len(sequences)))


@jax.jit
def _hidden(model: Decoder, tokens: jax.Array, counts: jax.Array) -> jax.Array:
    return model.hidden(tokens, counts)
