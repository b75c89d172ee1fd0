"""How much each linear map's error costs: the slope of the loss over the squared weight error.

Noise of a known size is added to one map at a time, and the KL divergence from the model's own
predictions is measured. HIGGS (Malinovskii et al. 2024, §3.2) measures perplexity alike; a KL
divergence has no term of first order in the noise, so that less text is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpjax.language_model import LanguageModel
from mpjax.models import Decoder, ExpertPlace, LinearPlace
from mpjax.quantization.text import windows_of

NOISE = 0.1  # of the root of the weight's mean square: the error of three to four bits
WINDOW, TOKENS, BATCH = 512, 4096, 2


def plain_places(model: Decoder) -> list[LinearPlace]:
    """The places of the linear maps of a model's layers. Raises ValueError unless all are plain."""
    places = [place for place in model.linear_places(model.config) if not place.is_table]
    for place in places:
        if isinstance(place, ExpertPlace):
            raise ValueError(f"{place.path} has experts, which a budget can't be divided among")
        if any(not isinstance(kernel, jax.Array) for kernel in place.kernels(model)):
            raise ValueError(
                f"{place.path} is quantised already: load the 16-bit checkpoint without a W part"
            )
    return places


def sensitivities(lm: LanguageModel, documents: Sequence[str], tokens: int = TOKENS) -> list[float]:
    """The slope of the KL divergence, in nats per token, for each of `plain_places`.

    A map whose weight gets the relative squared error t² costs about slope · t². tokens: the most
    that are read of the documents, each window in one pass without a cache. Raises ValueError for
    a model without a tokenizer, for empty documents and for a divergence that is not finite.
    """
    model, places = lm.model, plain_places(lm.model)
    batches = windows_of(
        documents,
        lm.require_tokenizer(),
        model.config.vocab_size,
        window=min(WINDOW, model.config.max_position_embeddings),
        most=tokens,
        batch=BATCH,
    )
    sums, count = [0.0] * len(places), 0
    for windows in batches:
        text, is_real = jnp.asarray(windows.tokens), jnp.asarray(windows.is_real)
        expected = _logprobs(model, text)
        count += int(windows.is_real.sum())
        for index, place in enumerate(places):
            [part] = place.parts(model)
            kernel = part.kernel.get_value()
            part.kernel.set_value(_noisy(kernel, index))
            try:
                sums[index] += float(_divergence(model, text, is_real, expected))
            finally:
                part.kernel.set_value(kernel)
    slopes = [total / count / NOISE**2 for total in sums]
    for place, slope in zip(places, slopes, strict=True):
        if not 0 <= slope < float("inf"):
            raise ValueError(f"{place.path}: the KL divergence is {slope}: look at the checkpoint")
    return slopes


@jax.jit
def _noisy(kernel: jax.Array, seed: jax.typing.ArrayLike) -> jax.Array:
    wide = kernel.astype(jnp.float32)
    noise = jax.random.normal(jax.random.key(seed), kernel.shape)
    return (wide + NOISE * jnp.sqrt((wide**2).mean()) * noise).astype(kernel.dtype)


@jax.jit
def _logprobs(model: Decoder, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(tokens))


@jax.jit
def _divergence(
    model: Decoder, tokens: jax.Array, is_real: jax.Array, expected: jax.Array
) -> jax.Array:
    """The sum over real tokens of the KL divergence of a model's predictions from expected ones."""
    found = jax.nn.log_softmax(model(tokens))
    divergence = (jnp.exp(expected) * (expected - found)).sum(-1)
    return jnp.where(is_real, divergence, 0.0).sum()
