"""Compares a model with another, usually its 16-bit version, token by token."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import require_documents
from mpjax.errors import NotFiniteError
from mpjax.evaluation.divergence import divergence
from mpjax.evaluation.perplexity import Evaluation, cut, read_window, summarise
from mpjax.evaluation.reading import Caches, read
from mpjax.evaluation.windows import Cut
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder


@dataclasses.dataclass(frozen=True)
class Comparison(Evaluation):
    """How far a model's predictions are from those of a reference, over `tokens` positions.

    The fields of Evaluation are the model's. reference_perplexity: the reference's.
    kl_mean, kl_median, kl_p99: mean, median and 99th percentile of the Kullback-Leibler divergence
        Σ p ln(p / q) in nats, where p are the reference's probabilities of the next token and q
        the model's.
    kl_error: the standard error of kl_mean, if tokens were independent.
    same_top: the share of positions at which both have the same most likely token.
    """

    reference_perplexity: float = math.nan
    kl_mean: float = math.nan
    kl_median: float = math.nan
    kl_p99: float = math.nan
    kl_error: float = math.nan
    same_top: float = math.nan


def compare(
    lm: LanguageModel,
    reference: LanguageModel,
    documents: Iterable[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    progress: bool | None = None,
) -> Comparison:
    """Perplexity of a model, and the KL divergence of its predictions from a reference's.

    Documents are joined by empty lines and cut into windows of `window` tokens, as papers measure
    perplexity; see `evaluate`. Both models run on each window, each with a cache in its own KV
    format. Their logits are compared on the device, a chunk of a batch at a time.

    reference: a model of the same vocabulary, usually the 16-bit one. It is on the device beside
        `lm`.
    window, batch, progress: as for `evaluate`. stride: the tokens between the beginnings of
        windows; by default the window.

    Raises ValueError for models with different tokenizers; otherwise as `evaluate` does.
    """
    for name, given in (("lm", lm), ("reference", reference)):
        require_type(name, given, LanguageModel, hint=", as mpjax.load gives it")
    batch = whole_number("batch", batch)
    require_documents(documents)
    documents = list(documents)
    window = min(read_window(model, window) for model in (lm, reference))
    found, expected_cut = (
        cut(model, documents, window, window if stride is None else stride)
        for model in (lm, reference)
    )
    _require_one_tokenizer(lm, reference, found, expected_cut)
    sequences = [piece.tokens for piece in found.windows]
    scores = read([lm, reference], _differ, sequences, batch=batch, progress=progress)
    for index, (own, expected, *_) in enumerate(scores):
        for model, values in ((lm, own), (reference, expected)):
            if np.isnan(values).any():
                raise NotFiniteError("window", index, model.config.dtype)
    own, expected, divergences, agrees = zip(*scores, strict=True)
    kept = [
        np.concatenate(
            [one[piece.first - 1 :] for one, piece in zip(arrays, found.windows, strict=True)]
        )
        for arrays in (divergences, agrees)
    ]
    measures: dict[str, Any] = dataclasses.asdict(summarise(own, found))
    measures |= _of_divergences(kept[0].astype(np.float64))
    return Comparison(
        **measures,
        reference_perplexity=summarise(expected, found).perplexity,
        same_top=float(kept[1].mean()),
    )


def _of_divergences(values: np.ndarray) -> dict[str, float]:
    spread = values.std(ddof=1) if len(values) > 1 else math.nan
    return {
        "kl_mean": float(values.mean()),
        "kl_median": float(np.median(values)),
        "kl_p99": float(np.percentile(values, 99)),
        "kl_error": float(spread / math.sqrt(len(values))),
    }


def _require_one_tokenizer(
    lm: LanguageModel, reference: LanguageModel, found: Cut, expected: Cut
) -> None:
    """Raises ValueError if the models can't be compared token by token."""
    sizes = lm.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model has a vocabulary of {sizes[0]} tokens, and the reference one of "
            f"{sizes[1]}: expected two versions of one model"
        )
    pairs = zip(found.windows, expected.windows, strict=False)
    if not all(np.array_equal(one.tokens, other.tokens) for one, other in pairs):
        raise ValueError(
            "the tokenizers of the model and the reference give different tokens for this text: "
            "expected two versions of one model"
        )


@functools.partial(jax.jit, donate_argnames="caches")
def _differ(
    models: tuple[Decoder, ...], tokens: jax.Array, counts: jax.Array, caches: Caches
) -> tuple[tuple[jax.Array, ...], Caches]:
    """A `Score`: log-probabilities of both models, KL divergences, and top-1 agreement."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    (found, cache), (exact, other) = (
        model.step(inputs, counts, cache, every_position=True)
        for model, cache in zip(models, caches, strict=True)
    )
    # Logits of sharded models are padded with -inf, whose differences would be NaN.
    found, exact = (
        logits[..., : model.config.vocab_size]
        for model, logits in zip(models, (found, exact), strict=True)
    )
    agrees = found.argmax(-1) == exact.argmax(-1)
    found, exact = (jax.nn.log_softmax(logits, axis=-1) for logits in (found, exact))
    own, expected = (
        jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]
        for values in (found, exact)
    )
    # Rounding can make a sum slightly negative; a divergence is not.
    divergences = jnp.maximum(divergence(exact, found), 0.0)
    return (own, expected, divergences, agrees), (cache, other)
