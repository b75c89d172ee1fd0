"""Every KV format: the tokens of a full forward pass over what the cache makes of keys and values.

The whole path is on trial: positions, what a block waits for, which scales; and not the rounding
alone, which has tests of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.generation.decoding import generate_tokens
from mpjax.kernels import KVFormat
from mpjax.kernels.kv_cache.codes import KEY_KINDS, VALUE_KINDS
from mpjax.models import CacheScales, Decoder
from mpjax.precision import Precision
from tests.models.small import forward, small_config, small_model
from tests.mpjax.dequantized_cache import DequantizedCache, block_of, largest_as_scales
from tests.sweeps import in_sweep

pytestmark = [pytest.mark.usefixtures("exact_products"), pytest.mark.any_version]

FORMATS = ("KV16", "KV8", "KV8s", "KVfp8", "KV4", "KV4t", "KV4c", "KV2g32", "KV2t", "K8V4cg64")
# Other sizes of groups, and other pairs of keys and values.
SWEPT_FORMATS = ("KV4cg64", "KV4cg32", "KV2", "KV2g64", "K8V4", "K4cV4c", "K4cg32V4cg32")
# A second layer's keys depend on what the first attended to. It takes twice as long to compile.
TWO_LAYERS = ("KV8", "KV4c")
SIZES: dict[str, Any] = {
    "head_dim": 64,
    "max_position_embeddings": 512,
    # Frequencies that are powers of two make angles exact: keys are rounded as the oracle's are.
    "rope_theta": 2.0**32,
}
NEW = 40
# By the block: new tokens begin one late, soon, at once and when it is over; or pages of 32.
PROMPTS = {None: (64, 5, 40), 128: (100, 127, 128, 131), 256: (230, 255, 256, 259)}


def test_every_kind_of_codes_has_a_format():
    formats = [KVFormat.parse(text) for text in (*FORMATS, *SWEPT_FORMATS)]
    assert {str(format.keys) for format in formats} == set(KEY_KINDS)
    assert {str(format.values) for format in formats} == set(VALUE_KINDS)


def attentive_model(windows: tuple[int | None, ...]) -> Decoder:
    """One that says nothing with certainty, and most of what it says because of what it attends."""
    model: Any = small_model(small_config(windows=windows, **SIZES))
    for weight, factor in ((model.embedding, 0.1), (model.head, 0.25)):
        weight.set_value(weight.get_value() * factor)
    return model


@pytest.mark.parametrize("text", [*FORMATS, *map(in_sweep, SWEPT_FORMATS)])
def test_tokens_are_those_of_a_forward_pass_over_the_dequantised_cache(text, monkeypatch):
    format = Precision.parse(f"W16A16{text}").kv
    model = attentive_model((90, None) if text in TWO_LAYERS else (None,))
    prompts = PROMPTS[block_of(format)]
    longest = max(prompts)
    shape = len(prompts), longest + NEW
    texts = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    scales = largest_as_scales(model, texts[:, :longest], format)
    if scales is not None:
        of_heads = scales.shape[-1] == 1
        model.cache_scales = CacheScales(jnp.asarray(scales[..., 0] if of_heads else scales))
    size = max(32, format.group or 1)  # so that a row has several pages
    small = functools.partialmethod(Decoder.create_cache, page_size=size)
    monkeypatch.setattr(Decoder, "create_cache", small)
    found = generate_tokens(
        model,
        jnp.asarray(texts[:, :longest]),
        jnp.asarray(prompts),
        max_new_tokens=NEW,
        sampling={"stop_ids": ()},
        kv_format=format,
    )
    tokens = np.asarray(found.tokens)
    for row, prompt, new in zip(texts, prompts, tokens, strict=True):
        row[prompt : prompt + NEW] = new
    drawn_from = np.array(prompts)[:, None] - 1 + np.arange(NEW)

    def logprobs(**options: Any) -> np.ndarray:
        logits = np.take_along_axis(forward(model, texts, **options), drawn_from[..., None], 1)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def error(expected: np.ndarray) -> float:
        of_tokens = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
        return np.abs(np.asarray(found.logprobs) - of_tokens).max()

    expected = logprobs(attend=DequantizedCache(format, scales))
    np.testing.assert_array_equal(tokens, expected.argmax(-1))
    # Sums in float32 are off by 4e-6. Where they turn a code to its neighbour, the tokens that
    # attend to it are, by 3e-4 at 4 bits and more at 2.
    tolerance = 5e-3 if text.startswith("KV2") else 1e-3
    assert error(expected) < tolerance
    assert (error(logprobs()) > 10 * tolerance) == (text != "KV16"), "nothing was rounded"
