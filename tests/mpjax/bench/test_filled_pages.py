from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.bench import filled_pages
from mpjax.kernels import KVFormat, KVLayout, PagedKVCache


def cache(format="KV16", page_size=16):
    return PagedKVCache.create(
        KVLayout(1, 64, KVFormat.parse(format), page_size=page_size),
        layers=1,
        batch=2,
        max_tokens=7 * page_size,
    )


@pytest.mark.parametrize("at_once", [48, 1024])
@pytest.mark.parametrize("tokens", [97, (97, 33)])
def test_every_token_and_no_other_is_written(monkeypatch, at_once, tokens):
    monkeypatch.setattr(filled_pages, "APPENDED_TOKENS", at_once)
    filled_pages.fill.clear_cache()  # type: ignore[attr-defined]
    empty = cache()
    filled = filled_pages.fill(empty.layers[0], empty.block_tables, jnp.asarray(tokens), 3)
    filled_pages.fill.clear_cache()  # type: ignore[attr-defined]
    for words in (filled.keys, filled.values):
        # [sequences, pages, 1, page size, dim] in the order of the block tables
        found = np.asarray(words.astype(jnp.float32))[np.asarray(empty.block_tables)]
        written = np.abs(found).sum((2, 4)).reshape(2, -1) > 0
        expected = np.arange(7 * 16) < np.broadcast_to(tokens, 2)[:, None]
        np.testing.assert_array_equal(written, expected)
        numbers = found[np.abs(found) > 0]
        assert abs(numbers.mean()) < 0.05
        assert numbers.std() == pytest.approx(1.0, abs=0.05)
    assert not np.array_equal(filled.keys, filled.values)


def test_a_residual_holds_what_comes_after_the_last_full_block():
    empty = cache("KV2", page_size=128)
    assert empty.layers[0].residual is not None
    block = empty.layers[0].residual.page_size
    filled = filled_pages.fill(empty.layers[0], empty.block_tables, block + 70, 0)
    assert filled.residual is not None
    waiting = np.abs(np.asarray(filled.residual.keys, np.float32)).sum((1, 3)) > 0
    assert waiting.shape == (2, block)
    assert waiting[:, :70].all()
    packed = np.asarray(filled.keys)[np.asarray(empty.block_tables)]
    assert packed[:, : block // 128].any()
    assert not packed[:, block // 128 :].any()
