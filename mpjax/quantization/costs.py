"""Measures the cost of rounding each linear map alone, as KL divergence of the predictions.

The divergence of a model with several rounded maps is about the sum of theirs (HIGGS, Malinovskii
et al. 2024, §3). HIGGS measures one slope per map by adding noise, and multiplies it by each
format's error. Here rounding itself is measured, since its errors grow with the weights and so cost
differently than noise.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from mpjax.evaluation.divergence import divergence
from mpjax.kernels import WeightFormat
from mpjax.kernels.grid import fit
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder, ExpertPlace, LinearPlace
from mpjax.quantization.text import Calibration

WINDOW, TOKENS, BATCH = 512, 4096, 2


def plain_places(model: Decoder) -> list[LinearPlace]:
    """The places of the layers' linear maps. Raises ValueError unless all are in 16 bits."""
    places = [place for place in model.linear_places(model.config) if not place.is_table]
    for place in places:
        if isinstance(place, ExpertPlace):
            raise ValueError(f"{place.path} has experts, which a budget can't be divided among")
        if any(not isinstance(kernel, jax.Array) for kernel in place.kernels(model)):
            raise ValueError(
                f"{place.path} is quantised already: load the 16-bit checkpoint without a W part"
            )
    return places


def rounding_costs(
    lm: LanguageModel,
    documents: Sequence[str],
    formats: Sequence[Sequence[WeightFormat]],
    tokens: int = TOKENS,
) -> list[list[float]]:
    """The KL divergence, in nats per token, if only one linear map is rounded to nearest.

    formats: for each of `plain_places`, the formats to measure; the result has the same structure.
    tokens: the most tokens of the documents; each window is one forward pass without a cache.

    Raises ValueError for a model without a tokenizer, for empty documents and for a divergence that
    is not finite.
    """
    model, places = lm.model, plain_places(lm.model)
    calibration = Calibration(WINDOW, tokens, BATCH)
    batches = calibration.windows(documents, lm.require_tokenizer(), model.config)
    sums = [[0.0] * len(own) for own in formats]
    count = sum(int(windows.is_real.sum()) for windows in batches)
    for windows in batches:
        text, is_real = jnp.asarray(windows.tokens), jnp.asarray(windows.is_real)
        expected = _logprobs(model, text)
        for place, own, found in zip(places, formats, sums, strict=True):
            for index, format in enumerate(own):
                with _rounded(place, model, format):
                    found[index] += float(_divergence(model, text, is_real, expected)) / count
    for place, found in zip(places, sums, strict=True):
        if not all(map(math.isfinite, found)):
            raise ValueError(
                f"{place.path}: the KL divergence is {sum(found)}: look at the checkpoint"
            )
    return sums


@contextlib.contextmanager
def _rounded(place: LinearPlace, model: Decoder, format: WeightFormat) -> Iterator[None]:
    """A context in which one linear map's weight is rounded to nearest."""
    [part] = place.parts(model)
    kernel = part.kernel.get_value()
    part.kernel.set_value(_round(kernel, format) if format.is_packed else kernel)
    try:
        yield
    finally:
        part.kernel.set_value(kernel)


@functools.partial(jax.jit, static_argnames="format")
def _round(kernel: jax.Array, format: WeightFormat) -> jax.Array:
    wide = kernel.astype(jnp.float32)
    return fit(wide, format).round(wide).dequantize().astype(kernel.dtype)


@jax.jit
def _logprobs(model: Decoder, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(tokens))


@jax.jit
def _divergence(
    model: Decoder, tokens: jax.Array, is_real: jax.Array, expected: jax.Array
) -> jax.Array:
    """The KL divergence of a model's predictions from `expected`, summed over real tokens."""
    found = jax.nn.log_softmax(model(tokens))
    return jnp.where(is_real, divergence(expected, found), 0.0).sum()
