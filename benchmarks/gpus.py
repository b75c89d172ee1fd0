"""Descriptions of GPUs with which tools compile without the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.experimental import topologies

from mpjax.kernels import device


class GPU(NamedTuple):
    """A GPU's properties, from NVIDIA's data sheets.

    like: the device kind of a GPU with the same compute capability that JAX knows.
    shared, threads: KiB of shared memory, and threads, per multiprocessor.
    bandwidth: of memory, in 10⁹ bytes per second. memory: GiB.
    """

    multiprocessors: int
    compute_capability: float
    like: str
    shared: int
    threads: int
    bandwidth: int
    memory: int


# JAX's device kind → properties.
GPUS = {
    "NVIDIA A100-SXM4-80GB": GPU(108, 8.0, "NVIDIA A100", 164, 2048, 2039, 80),
    "NVIDIA GeForce RTX 3090": GPU(82, 8.6, "NVIDIA A10", 100, 1536, 936, 24),
    "NVIDIA GeForce RTX 4090": GPU(128, 8.9, "NVIDIA L40", 100, 1536, 1008, 24),
    "NVIDIA L40S": GPU(142, 8.9, "NVIDIA L40", 100, 1536, 864, 48),
    "NVIDIA H100 80GB HBM3": GPU(132, 9.0, "NVIDIA H100", 228, 2048, 3350, 80),
    "NVIDIA H200": GPU(132, 9.0, "NVIDIA H200", 228, 2048, 4800, 141),
    "NVIDIA B200": GPU(148, 10.0, "NVIDIA B200", 228, 2048, 7700, 180),
    "NVIDIA GeForce RTX 5090": GPU(170, 12.0, "NVIDIA RTX PRO 6000", 100, 1536, 1792, 32),
}
# The fields that XLA reads; `feature_extension` allows instructions of this capability only.
_TARGET = """
gpu_device_info {{ {several}
  threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128 clock_rate_ghz: 1.7
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 33554432
  threads_per_core_limit: {gpu.threads} core_count: {gpu.multiprocessors}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared_of_core}
  memory_bandwidth: {gpu.bandwidth}000000000 device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.like}"
"""

# Fields of GPUs with NVLink. Without versions, XLA leaves kernels of Mosaic GPU out of CUDA graphs.
_SEVERAL = """device_interconnect_info { active_links: 18 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" """


@contextlib.contextmanager
def described(name: str) -> Iterator[None]:
    """A context in which kernels are chosen, and Triton kernels lowered, for one of GPUS."""
    gpu = GPUS[name]
    abstract = jax.sharding.AbstractDevice(device_kind=gpu.like, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=abstract)
    capability, multiprocessors = gpu.compute_capability, gpu.multiprocessors
    with (
        device.described_as(name, compute_capability=capability, multiprocessors=multiprocessors),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def mesh_of(name: str, devices: int = 1) -> jax.sharding.Mesh:
    """A mesh of one of GPUS, to compile for with JAX's CUDA plugin; it can't run programs.

    devices: GPUs of one host, connected by NVLink if there are several.

    Raises NotImplementedError without the plugin.
    """
    gpu = GPUS[name]
    major, minor = str(gpu.compute_capability).split(".")
    target = _TARGET.format(
        gpu=gpu,
        several=_SEVERAL if devices > 1 else "",
        shared=device.shared_memory(gpu.compute_capability),
        shared_of_core=1024 * gpu.shared,
        memory=gpu.memory * 2**30,
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if major in ("9", "10") else "NONE",
    )
    found = topologies.get_topology_desc(
        gpu.like, platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )
    return jax.sharding.Mesh(found.devices, ("device",))
