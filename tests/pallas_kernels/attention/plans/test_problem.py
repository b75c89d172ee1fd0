from __future__ import annotations

import jax
import pytest

from mpjax.kernels import KVFormat, KVLayout, PagedKVCache, device
from mpjax.kernels.attention.plans.problem import CacheShape, Problem
from tests.pallas_kernels.attention.plans.problems import problem


def test_it_is_read_off_the_pages_on_this_device():
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(
            KVLayout(2, 64, "KV4", page_size=32), layers=1, batch=3, max_tokens=100
        )
    )
    with device.described_as("NVIDIA Test", multiprocessors=7):
        found = Problem.of(5, cache.layers[0], cache.block_tables.shape, is_varlen=True)
        limits = device.limits()
    shape = CacheShape(KVFormat.parse("KV4"), 2, 64, 32)
    assert found == Problem(3, 5, 128, shape, limits, is_varlen=True)
    assert found.limits.multiprocessors == 7


@pytest.mark.parametrize(
    ("text", "head_dim", "sides"),
    [("KV16", 128, (256, 256)), ("K8V4", 128, (128, 64)), ("KV2", 96, (24, 24))],
)
def test_bytes_of_a_token(text, head_dim, sides):
    found = problem(text, heads=(8, head_dim))
    assert found.side_bytes == sides
    assert found.token_bytes == sum(sides)


@pytest.mark.parametrize(
    ("text", "tokens", "packed"),
    [("KV8", 4096, 4096), ("KV2", 4096, 3840), ("KV2", 4224, 4096), ("KV4c", 128, 0)],
)
def test_a_full_sequence_has_as_full_a_residual_as_can_be(text, tokens, packed):
    found = problem(text, tokens=tokens)
    assert found.packed_tokens == packed
    assert found.tiles(100) == -(-packed // 100)


def test_programs_of_all_sequences():
    assert problem(batch=3, rows=17).programs(16) == 3 * 8 * 2
