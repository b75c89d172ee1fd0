"""The fixtures of the kernels' tests, for whole models."""

from __future__ import annotations

from tests.pallas_kernels.conftest import interpreted_triton, pretend_gpu, without_gpu

__all__ = ["interpreted_triton", "pretend_gpu", "without_gpu"]
