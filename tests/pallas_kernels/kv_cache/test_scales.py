from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, Span, append, cache_scales
from mpjax.kernels.kv_cache import reference
from tests.pallas_kernels.oracles import wide


@pytest.mark.parametrize(("text", "reach"), [("KV8s", 127), ("K8V8s", 127), ("KVfp8", 448)])
def test_the_largest_value_is_the_largest_code(text, reach, rng):
    format = KVFormat.parse(text)
    x = rng.standard_normal((3, 50, 2, 8)).astype(np.float32) * np.arange(8)
    scales = cache_scales(jnp.asarray(x), format)
    largest = np.abs(x).max((0, 1)) if reach == 127 else np.abs(x).max((0, 1, 3))
    expected = np.where(largest == 0, 1, largest / reach)
    assert scales.dtype == jnp.float32
    np.testing.assert_allclose(scales, expected, rtol=1e-6)


@pytest.mark.parametrize("text", ["KV8s", "KVfp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_scales_tell_of_what_is_no_number(transform, value, text):
    """There are so many tokens that maxima of floats pass over NaN on a CPU."""
    x = np.ones((4096, 2, 64), np.float32)
    x[7, 1, 3] = value
    scales = np.asarray(transform(lambda x: cache_scales(x, text))(jnp.asarray(x)))
    expected = np.zeros(scales.shape, bool)
    expected[(1, 3) if text == "KV8s" else 1] = True
    np.testing.assert_array_equal(np.isnan(scales), expected)


@pytest.mark.parametrize("text", ["KV8s", "KVfp8"])
@pytest.mark.parametrize("value", [0, 1e-37, 1e-38, 1e-40])
def test_what_is_too_small_for_a_scale_has_one_that_the_cache_takes(value, text):
    scales = cache_scales(jnp.full((3, 2, 4), value), text)
    np.testing.assert_array_equal(scales, 1)
    PagedKVCache.create(
        KVLayout(2, 4, text),
        layers=1,
        batch=1,
        max_tokens=16,
        scales=jnp.stack([scales, scales])[None],
    )


def test_other_formats_are_given_none():
    with pytest.raises(ValueError, match="K4V8 is given no scales: KV8s and KVfp8 are"):
        cache_scales(jnp.ones((4, 2, 8)), KVFormat(4, 8))


def test_what_they_were_measured_on_is_off_by_half_a_step(rng):
    """The way of a researcher: measure, create, append; channels of all sizes."""
    x = rng.standard_normal((2, 2, 40, 3, 64)) * 10 ** rng.uniform(-2, 2, 64)
    keys, values = jnp.asarray(x.astype(np.float32))
    format = KVFormat.parse("KV8s")
    scales = jnp.stack([cache_scales(keys, format), cache_scales(values, format)])
    cache = PagedKVCache.create(
        KVLayout(3, 64, format), layers=1, batch=2, max_tokens=64, scales=scales
    )
    counts = jnp.full(2, 40, jnp.int32)
    write = jax.jit(append)
    pages = write(cache.layers[0], keys, values, Span(cache.block_tables, cache.lengths, counts))
    found = jax.jit(reference.gather)(pages, cache.block_tables)
    for side, stored, scale in zip((keys, values), found, wide(scales), strict=True):
        error = np.abs(wide(stored)[:, :40] - wide(side))
        assert (error <= scale * (0.5 + 1e-5)).all()


def test_the_format_may_be_text(rng):
    x = jnp.asarray(rng.standard_normal((5, 2, 8)), jnp.float32)
    for text in ("KV8s", "KVfp8"):
        expected = cache_scales(x, KVFormat.parse(text))
        np.testing.assert_array_equal(cache_scales(x, text), expected)
