"""Fixtures with which the Triton kernels run, or lower, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import pytest

import pallas_kernels.attention.triton
import pallas_kernels.gemm.triton
import pallas_kernels.kv_cache.triton
from pallas_kernels import backend


@pytest.fixture(autouse=True)
def without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests without the mark `gpu` run on the CPU, and choose as there, also beside a GPU."""
    if jax.default_backend() == "cpu" or request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(backend, "compute_capability", lambda: None)
    monkeypatch.setattr(backend, "multiprocessors", lambda: 132)
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions choose as they do on a GPU; what they choose can be lowered only."""
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: None)
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    monkeypatch.setattr(backend, "multiprocessors", lambda: 132)


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions choose Triton kernels, which run interpreted, on any device."""
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: None)
    for module, name in (
        (pallas_kernels.gemm.triton, "matmul"),
        (pallas_kernels.gemm.triton, "dequantize"),
        (pallas_kernels.kv_cache.triton, "append"),
        (pallas_kernels.attention.triton, "paged_attention"),
    ):
        launch = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, launch)
