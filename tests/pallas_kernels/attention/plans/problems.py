"""Problems of attention."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import KVFormat
from mpjax.kernels.attention.plans.problem import CacheShape, Problem
from mpjax.kernels.device import Limits
from mpjax.kernels.kv_cache.api import HEAD_DIMS

H200 = Limits(132, 9.0)
DEVICES = (H200, Limits(108, 8.0), Limits(142, 8.9), Limits(84, 8.6), Limits(16, 8.0))
DEVICES += (Limits(170, 12.0),)
FORMATS = (
    *("KV16", "KV8", "KV8s", "KVfp8", "KV4", "KV4t", "K8V4", "K16V4", "KV4c", "KV4cg32"),
    *("K4cV4c", "K8V4c", "K4cV8", "KV2", "KV2g32", "KV2t", "K8V2"),
)


def problem(
    text: str = "KV8",
    batch: int = 8,
    rows: int = 4,
    tokens: int = 4096,
    heads: tuple[int, int] = (8, 128),
    limits: Limits = H200,
    **options: bool,
) -> Problem:
    """A problem with pages of 128 tokens. heads: KV heads, and their dimension."""
    cache = CacheShape(KVFormat.parse(text), *heads)
    return Problem(batch, rows, tokens, cache, limits, **options)


def _problem(text: str, *sizes: int) -> Problem:
    batch, rows, pages, kv_heads, head_dim, page_size, device, is_varlen = sizes
    format = KVFormat.parse(text)
    page_size = max(page_size, format.group or 1)
    cache = CacheShape(format, kv_heads, head_dim, page_size)
    limits = DEVICES[device]
    return Problem(batch, rows, pages * page_size, cache, limits, is_varlen=bool(is_varlen))


any_problem = given(
    st.builds(
        _problem,
        st.sampled_from(FORMATS),
        st.integers(1, 600),
        st.integers(1, 100_000),
        st.integers(1, 5000),
        st.integers(1, 128),
        st.sampled_from(HEAD_DIMS),
        st.sampled_from([16, 32, 64, 128, 256]),
        st.integers(0, len(DEVICES) - 1),
        st.integers(0, 1),
    )
)
