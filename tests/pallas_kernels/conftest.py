"""Fixtures with which the kernels run, or lower, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import mpjax.kernels.attention.triton
import mpjax.kernels.experts.counting
import mpjax.kernels.experts.routing_triton
import mpjax.kernels.experts.triton
import mpjax.kernels.gemm.dequantize
import mpjax.kernels.gemm.gradient
import mpjax.kernels.gemm.triton
import mpjax.kernels.kv_cache.triton
import mpjax.kernels.low_rank.gate
import mpjax.kernels.low_rank.triton
import mpjax.kernels.rotary.triton
import mpjax.kernels.rowwise.blocks
import mpjax.kernels.rowwise.projection
import mpjax.kernels.rowwise.triton
from mpjax.kernels import device
from mpjax.kernels.gemm.plans.limits import why_no_wgmma
from mpjax.kernels.plans import tables
from mpjax.kernels.target import tracing_for
from tests.pallas_kernels import numpy_ptx
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
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The public functions choose as they do on an H200; what they choose can be lowered only."""
    # The plans that ship, and none of this machine's own.
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    with device.described_as("NVIDIA H200"):
        yield


@pytest.fixture
def wgmma() -> None:
    """Skips a test, with the reason, on a GPU that has not this instruction."""
    if reason := why_no_wgmma(device.limits()):
        pytest.skip(reason)


@pytest.fixture
def interpreted_ptx() -> Iterator[None]:
    """Decoders, and kernels that are interpreted, have inline PTX, which numpy runs."""
    with tracing_for(numpy_ptx.NumpyPTX()):
        yield


@pytest.fixture
def attention_with_ptx() -> Iterator[None]:
    """Interpreted attention decodes to subnormals, as on a GPU, and multiplies them as there."""
    scenes.kernel.clear_cache()  # type: ignore[attr-defined] # knows no targets
    target = numpy_ptx.WithSubnormals()
    with tracing_for(target):
        yield
    scenes.kernel.clear_cache()  # type: ignore[attr-defined]
    assert target.snippets


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions choose Triton kernels, which run interpreted, on any device."""
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: None)
    monkeypatch.setattr(
        mpjax.kernels.gemm.plans.limits, "why_no_wgmma", lambda limits: "only Triton is interpreted"
    )
    for module, name in (
        (mpjax.kernels.gemm.triton, "matmul"),
        (mpjax.kernels.gemm.triton, "matmul_terms"),
        (mpjax.kernels.gemm.dequantize, "write_out"),
        (mpjax.kernels.gemm.gradient, "write_out"),
        (mpjax.kernels.experts.triton, "products"),
        (mpjax.kernels.experts.triton, "routed_products"),
        (mpjax.kernels.experts.counting, "counted"),
        (mpjax.kernels.experts.routing_triton, "route"),
        (mpjax.kernels.low_rank.gate, "gated"),
        (mpjax.kernels.low_rank.triton, "shrink"),
        (mpjax.kernels.low_rank.triton, "expand"),
        (mpjax.kernels.kv_cache.triton, "append"),
        (mpjax.kernels.kv_cache.triton, "flush"),
        (mpjax.kernels.attention.triton, "paged_attention"),
        (mpjax.kernels.rotary.triton, "rotate_and_append"),
        (mpjax.kernels.rowwise.block_norm, "add_rms_norm"),
        (mpjax.kernels.rowwise.blocks, "gated_silu"),
        (mpjax.kernels.rowwise.blocks, "quantize_rows"),
        (mpjax.kernels.rowwise.projection, "projected"),
        (mpjax.kernels.rowwise.triton, "add_rms_norm"),
        (mpjax.kernels.rowwise.triton, "gated"),
        (mpjax.kernels.rowwise.triton, "hadamard"),
        (mpjax.kernels.rowwise.triton, "quantize_rows"),
    ):
        launch = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, launch)
