"""Compiling kernels to machine code for GPUs that this machine need not have."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import compiled
from benchmarks.gpus import GPUS
from mpjax.kernels import device

PLUGINS = [f"jax_plugins.xla_cuda{version}" for version in (12, 13)]


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even its package
        return False


with_plugin = pytest.mark.skipif(
    not any(map(is_installed, PLUGINS)), reason="JAX's CUDA plugin is not installed"
)


def rows_of(folder, gpu: str, only: str) -> list[dict]:
    """The result of a process of its own, since libraries read their settings at the start."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--gpu", gpu, "--only", only]
    skip = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    subprocess.run([*command, "--output", folder], check=True, env={**os.environ, **skip})
    [path] = folder.iterdir()
    return json.loads(path.read_text())["results"]


@with_plugin
@pytest.mark.parametrize(
    "gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"]
)
def test_a_kernel_fits_the_gpu(gpu, tmp_path):
    [row] = rows_of(tmp_path, gpu, "attention KV4 prompt")
    assert row["failed"] == row["spilling"] == {}
    assert "attention_kv4" in row["kernels"]
    assert 0 < row["shared"] <= device.shared_memory(GPUS[gpu].compute_capability)
    assert 0 < row["registers"] <= 255


@with_plugin
def test_a_sum_over_devices_is_one_launch_in_a_graph(tmp_path):
    """Nothing zeroes or copies the inbox between sums, and nothing else waits for devices."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_gpu_graph_min_graph_size=1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.compiled_sums", str(tmp_path)],
        env={**os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
    )
    _, body = done.stdout.split("body:")
    launches = re.findall(r"^ +\d+: (\w+)", body, re.MULTILINE)
    assert launches[0] == "kCommandBuffer"
    assert launches.count("kCustomCall") == 2
    # The others are the loop's counter and what is between sums.
    assert launches[1:].count("kCustomKernel") == len(launches) - 3 == 3


@with_plugin
@pytest.mark.parametrize("text", ["int8/int8 4096", "uint4:g128 4096"])
def test_products_of_many_rows_are_not_serialized_on_hopper(text, tmp_path):
    """Neither where warpgroups can give registers nor where they can't."""
    [row] = rows_of(tmp_path, "NVIDIA H200", f"matmul {text} 4096x24576")
    assert row["failed"] == row["spilling"] == row["serialized"] == {}
    assert any("warpgroups" in kernel for kernel in row["kernels"])


SAID = """\
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'slow' in line 665
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'slow' for 'sm_90a'
    512 bytes stack frame, 1152 bytes spill stores, 944 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 17 bytes smem
ptxas info    : Compiling entry function 'fast' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 92 registers, used 1 barriers, 384 bytes cmem[0]
"""


def test_what_compilers_say_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text(SAID)
    launches = "001: kCustomKernel [source | sink] fast grid: [1, 384, 1] threads: [128, 1, 1]"
    (tmp_path / "a.thunk_sequence.txt").write_text(f"{launches}  shared_memory: 33792 bytes\n")
    assert list(compiled.kernels(tmp_path, log)) == [
        compiled.Kernel("slow", 0, 0, 128, 1152, is_serialized=True),
        compiled.Kernel("fast", 128, 33792, 92, 0),
    ]
