"""Times in the place of CUPTI's: what is measured is computed, and took as long as a test says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from mpjax.bench import measure


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`take(a=3.0, b=1.0)`: from now on every call launches the kernels a and b."""

    def install(**kernels: float) -> None:
        def kernel_microseconds(function: Any, *arguments: Any, iterations: int = 5) -> Any:
            jax.block_until_ready(function(*arguments))
            return dict(kernels)

        monkeypatch.setattr(measure, "kernel_microseconds", kernel_microseconds)

    monkeypatch.setattr(measure, "ROTATED_BYTES", 1e5)
    return install


@pytest.fixture
def without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.nn's attention by XLA, which every machine has."""
    attend = jax.nn.dot_product_attention

    @functools.wraps(attend)
    def by_xla(*arguments: Any, implementation: str, **masks: Any) -> jax.Array:
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"):
            return attend(*arguments, implementation="xla", **masks)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
