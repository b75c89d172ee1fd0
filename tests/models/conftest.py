"""The fixtures of the kernels' tests, for whole models."""

from __future__ import annotations

import pytest

from mpjax.models import layer
from tests.pallas_kernels.conftest import interpreted_triton, pretend_gpu, without_gpu

__all__ = ["interpreted_triton", "pretend_gpu", "without_gpu"]


@pytest.fixture(autouse=True)
def untraced_layers() -> None:
    """No layer is as another test traced it, maybe with other implementations in its place."""
    layer.apply.clear_cache()  # type: ignore[attr-defined]
