from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax import calibrate_cache
from mpjax.errors import NotFiniteError
from mpjax.evaluation.windows import document_tokens
from mpjax.kernels import KVFormat
from mpjax.kernels.kv_cache.reference import gather
from tests.mpjax.odd_models import with_damaged_token

DOCUMENTS = ["import os\nimport sys", "", "def f(x):\n    return x + 1\n" * 2]
WINDOW = 16


@jax.jit
def keys_and_values(model, tokens):
    """[layers, 2, 1, capacity, KV heads, head dim], zeros behind the tokens."""
    cache = model.create_cache(1, tokens.shape[1], KVFormat())
    _, cache = model.step(tokens, jnp.full(1, tokens.shape[1]), cache, fresh=True)
    return [gather(pages, cache.tables[0]) for pages in cache.layers]


@pytest.mark.parametrize(("text", "reach"), [("KV8s", 127), ("K8Vfp8", 448)])
def test_the_largest_keys_and_values_are_the_largest_codes(text, reach, two_layers):
    lm = dataclasses.replace(two_layers, kv_format=KVFormat.parse(text))
    found = calibrate_cache(lm, DOCUMENTS, window=WINDOW)
    largest: list[np.ndarray] = []
    for document in DOCUMENTS:
        ids = document_tokens(two_layers.tokenizer, document)
        for begin in range(0, len(ids), WINDOW):
            piece = ids[begin : begin + WINDOW]
            sides = np.asarray(keys_and_values(two_layers.model, jnp.asarray([piece])))
            axes = (2, 3) if reach == 127 else (2, 3, 5)
            largest.append(np.abs(sides).max(axes))
    assert found.model.cache_scales is not None
    scales = found.model.cache_scales.get_value()
    np.testing.assert_allclose(scales, np.max(largest, 0) / reach, rtol=1e-4)
    assert two_layers.model.cache_scales is None
    assert found.updates is not two_layers.updates
    cache = found.model.create_cache(1, 16, found.kv_format)
    np.testing.assert_array_equal(cache.layers[1].value_parameters, scales[1, 1])
    again = jax.jit(lambda model: model.create_cache(1, 16, found.kv_format))(found.model)
    jax.tree.map(np.testing.assert_array_equal, cache, again)
    assert len(jax.tree.leaves(nnx.state(found.model))) == 1 + len(
        jax.tree.leaves(nnx.state(two_layers.model))
    )


def test_neither_padding_nor_what_is_beyond_the_limit_counts(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat.parse("KV8s"))

    def scales(documents, **options):
        return calibrate_cache(lm, documents, window=WINDOW, **options).model.cache_scales[...]

    short, other = "import os", "def f(x):\n    return x"
    count = len(document_tokens(tiny.tokenizer, short))
    assert count < WINDOW
    # With the padding's tokens in the place of the padding, their keys and values do count.
    padding = tiny.tokenizer.backend.id_to_token(0)
    assert (scales([short]) != scales([short + padding * (WINDOW - count)])).any()
    alone = calibrate_cache(lm, [short], window=count).model.cache_scales[...]
    np.testing.assert_allclose(scales([short]), alone, rtol=1e-4)
    assert (scales([short, other]) != scales([short])).any()
    np.testing.assert_array_equal(scales([short, other], max_tokens=count), scales([short]))


def test_scales_of_another_format_are_not_used_and_that_is_said(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat.parse("KV8s"))
    lm = calibrate_cache(lm, DOCUMENTS, window=WINDOW)
    with pytest.warns(
        UserWarning, match="are for channels, and KVfp8 has scales of heads, which are 1"
    ):
        cache = lm.model.create_cache(1, 16, KVFormat("fp8"))
    np.testing.assert_array_equal(cache.layers[0].key_parameters, 1)


def test_refusals(tiny):
    with pytest.raises(ValueError, match="KV16 has no scales to calibrate"):
        calibrate_cache(tiny, DOCUMENTS)
    lm = dataclasses.replace(tiny, kv_format=KVFormat("fp8"))
    with pytest.raises(ValueError, match="documents are empty"):
        calibrate_cache(lm, [])
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        calibrate_cache(dataclasses.replace(lm, tokenizer=None), DOCUMENTS)
    with pytest.raises(ValueError, match=r"documents is a text: pass a list, \[text\]"):
        calibrate_cache(lm, DOCUMENTS[0])
    for name, value in (("window", 0), ("window", -5), ("max_tokens", 0), ("max_tokens", 2.5)):
        with pytest.raises(ValueError, match=f"{name} is {value}: expected 1 or more"):
            calibrate_cache(lm, DOCUMENTS, **{name: value})


@pytest.mark.parametrize("text", ["KV8s", "KVfp8"])
def test_what_is_not_finite_gives_no_scales(tiny, text):
    lm = dataclasses.replace(tiny, kv_format=KVFormat.parse(text))
    token = tiny.tokenizer.encode(DOCUMENTS[2])[0]
    assert token not in document_tokens(tiny.tokenizer, DOCUMENTS[0])
    with pytest.raises(NotFiniteError, match=r"^document 2: the model computes NaN or infinite"):
        calibrate_cache(with_damaged_token(lm, token), DOCUMENTS, window=WINDOW)
    # Tokens that are not read don't count, and padding doesn't either.
    calibrate_cache(with_damaged_token(lm, token), DOCUMENTS[:2], window=WINDOW)
