"""Fixtures with which the Triton kernels run, or lower, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import mpjax.kernels.attention.triton
import mpjax.kernels.gemm.dequantize
import mpjax.kernels.gemm.gradient
import mpjax.kernels.gemm.triton
import mpjax.kernels.kv_cache.triton
import mpjax.kernels.rotary.triton
import mpjax.kernels.rowwise.triton
from mpjax.kernels import arithmetic, backend
from mpjax.kernels.attention import main_loop, queries
from mpjax.kernels.gemm import tables
from mpjax.kernels.gemm.limits import current_limits, why_no_wgmma
from tests.pallas_kernels import ptx
from tests.pallas_kernels.attention import scenes


@pytest.fixture(autouse=True)
def without_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests without the mark `gpu` run on the CPU, and choose as there, also beside a GPU."""
    if jax.default_backend() == "cpu" or request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The public functions choose as they do on an H200; what they choose can be lowered only."""
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: None)
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    monkeypatch.setattr(backend, "multiprocessors", lambda: 132)
    monkeypatch.setattr(backend, "compute_capability", lambda: 9.0)
    # The plans that ship, and none of this machine's own.
    monkeypatch.setattr(tables, "current_device", lambda: "NVIDIA H200")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))


@pytest.fixture
def wgmma() -> None:
    """Skips a test, with the reason, on a GPU that has not this instruction."""
    if reason := why_no_wgmma(current_limits()):
        pytest.skip(reason)


@pytest.fixture
def interpreted_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inline PTX runs in numpy, on any device."""
    monkeypatch.setattr(backend, "inline_ptx", ptx.inline_ptx)
    monkeypatch.setattr(backend, "share_pairs", ptx.share_pairs)


@pytest.fixture
def attention_with_ptx(interpreted_ptx: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted attention decodes to subnormals, as on a GPU, and multiplies them as there."""
    monkeypatch.setattr(backend, "dot", ptx.dot)
    like_ptx = arithmetic.PLAIN._replace(narrow=ptx.narrow, widen=ptx.widen)
    monkeypatch.setattr(arithmetic, "PTX", like_ptx)
    for module in (main_loop, queries):
        monkeypatch.setattr(module, "times_power", ptx.times_power)
    kernel, traced = mpjax.kernels.attention.triton._kernel, []

    def with_ptx(*references: Any, **options: Any) -> None:
        traced.append(True)
        kernel(*references, **{**options, "ptx": True})

    monkeypatch.setattr(mpjax.kernels.attention.triton, "_kernel", with_ptx)
    scenes.kernel.clear_cache()  # which knows nothing of what was replaced
    yield
    scenes.kernel.clear_cache()
    assert traced


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions choose Triton kernels, which run interpreted, on any device."""
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: None)
    monkeypatch.setattr(
        mpjax.kernels.gemm.limits, "why_no_wgmma", lambda limits: "only Triton is interpreted"
    )
    for module, name in (
        (mpjax.kernels.gemm.triton, "matmul"),
        (mpjax.kernels.gemm.triton, "matmul_terms"),
        (mpjax.kernels.gemm.dequantize, "write_out"),
        (mpjax.kernels.gemm.gradient, "write_out"),
        (mpjax.kernels.kv_cache.triton, "append"),
        (mpjax.kernels.kv_cache.triton, "flush"),
        (mpjax.kernels.attention.triton, "paged_attention"),
        (mpjax.kernels.rotary.triton, "rotate_and_append"),
        (mpjax.kernels.rowwise.triton, "add_rms_norm"),
        (mpjax.kernels.rowwise.triton, "gated_silu"),
        (mpjax.kernels.rowwise.triton, "quantize_rows"),
    ):
        launch = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, launch)
