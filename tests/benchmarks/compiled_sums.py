"""Compiles a loop with two sums over two H200s, and prints what XLA launches in it.

The first argument is an empty folder, to which XLA writes; see XLA_FLAGS in test_compiled.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpus import mesh_of
from mpjax.kernels import device, open_inbox, sum_over_devices


def run(x: jax.Array) -> jax.Array:
    inbox = open_inbox("device", 8192)

    def step(_: int, x: jax.Array) -> jax.Array:
        x = sum_over_devices(jax.lax.optimization_barrier(x + 1), "device", inbox)
        return sum_over_devices(jax.lax.optimization_barrier(x * 0.5), "device", inbox)

    return jax.lax.fori_loop(0, 9, step, x)


if __name__ == "__main__":
    mesh, divided = mesh_of("NVIDIA H200", 2), PartitionSpec("device")
    x = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=NamedSharding(mesh, divided))
    with device.described_as("NVIDIA H200"), jax.set_mesh(mesh):
        jax.jit(jax.shard_map(run, in_specs=divided, out_specs=divided)).lower(x).compile()
    [found] = Path(sys.argv[1]).glob("*thunk_sequence_after_thunk_passes.txt")
    print(found.read_text())
