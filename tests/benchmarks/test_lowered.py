from __future__ import annotations

import re

import jax
import pytest

from benchmarks import lowered
from benchmarks.gpus import GPUS
from benchmarks.representative_calls import calls
from mpjax.kernels.gemm import triton


def run(out, *arguments: str) -> dict[str, str]:
    """The texts of files by their names; nothing that was traced before is used."""
    jax.clear_caches()
    lowered.main([str(out), *arguments])
    return {path.stem: path.read_text() for path in out.iterdir()}


def test_a_call_has_a_file_of_its_program_and_its_kernels(tmp_path, capsys):
    texts = run(tmp_path / "out", "--only", "append KV8 ")
    assert capsys.readouterr().out == f"2 files in {tmp_path / 'out'}\n"
    assert set(texts) == {"append_KV8_1", "append_KV8_512"}
    program, kernel = texts["append_KV8_1"].split("\n=====\n")
    assert "ir = KERNEL1" in program
    assert "tt.func" in kernel
    assert "loc(" not in program + kernel


def test_texts_say_nothing_of_source_locations_and_all_of_kernels(tmp_path, monkeypatch):
    of_one = ("--only", "triton uint4:g32")
    first = run(tmp_path / "first", *of_one)
    store = triton.store
    monkeypatch.setattr(triton, "store", lambda *a, **k: store(*a, **k))  # from another line
    assert run(tmp_path / "same", *of_one) == first
    monkeypatch.setattr(triton, "store", lambda where, x, **k: store(where, x + x, **k))
    assert run(tmp_path / "other", *of_one) != first


def test_kernels_of_warpgroups_are_printed_too(tmp_path):
    [text] = run(tmp_path, "--only", "matmul uint4:g128 4096 1536x320").values()
    program, *kernels = text.split("\n=====\n")
    assert "kernel_hash = _" in program
    assert any("nvvm" in kernel or "nvgpu" in kernel for kernel in kernels)


def test_plans_are_those_of_the_named_gpu_and_not_of_the_users_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("MPJAX_TUNED", "a folder that is not there")
    texts = [
        run(tmp_path / gpu, "--gpu", gpu, "--only", "matmul uint4:g128 4096 1536x320")
        for gpu in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    ]
    assert texts[0] != texts[1]
    assert "kernel_hash" not in str(texts[1])


@pytest.mark.parametrize("gpu", [name for name, gpu in GPUS.items() if gpu.like != "NVIDIA H100"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("matmul uint4:g128 256 4096x24576", "matmul_uint4"),
        ("attention KV4 prompt", "attention_kv4"),
        ("append KV8 512", "append_kv8"),
        ("experts uint4:g128 16", "experts_uint4"),
        ("rows int8/int8", "gated_gelu"),
    ],
)
def test_calls_lower_for_every_described_gpu(gpu, name, kernel):
    """Each kernel is Triton's but on Hopper, where some are Mosaic GPU's."""
    text = lowered.lower(gpu, *dict(calls())[name]())
    is_hopper = GPUS[gpu].compute_capability == 9.0
    assert re.search(rf'name = "{kernel}', text) or (is_hopper and "mosaic_gpu" in text)
    assert is_hopper or "mosaic_gpu" not in text


def test_a_call_that_the_gpu_cannot_do_says_why(tmp_path):
    arguments = ("--gpu", "NVIDIA A100-SXM4-80GB", "--only", "triton float8:gK/float8")
    [text] = run(tmp_path, *arguments).values()
    assert text.startswith("matmul: 'triton' can't run: ")
