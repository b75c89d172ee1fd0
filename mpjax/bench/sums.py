"""Benchmark of sums over devices, of which each layer of a divided model has two."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.bench import tables
from mpjax.devices import read_devices
from mpjax.kernels import UnsupportedError, open_inbox, sum_over_devices

CHAIN = 64  # successive operations in a step of a loop, as in a decoding step
STEPS = 16  # of the loop, inside one jit
ROUNDS = 11  # the first round compiles and is not counted
COLUMNS: tables.Columns = {
    "devices": "{devices}",
    "dtype": "{dtype}",
    "size": tables.scaled("{:.0f} KiB", "bytes", 1 / 1024),
    "sum and addition": "{pair_microseconds:.1f} µs",
    "addition": "{addition_microseconds:.1f} µs",
    "sum": "{sum_microseconds:.1f} µs",
    "by inbox": lambda row: (
        f"{row['inbox_microseconds']:.1f} µs" if row.get("inbox_microseconds") else "–"
    ),
    "GB/s": lambda row: f"{row['bytes'] / max(row['sum_microseconds'], 1e-3) / 1e3:.1f}",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: every dtype with every size in KiB, on `devices` devices.

    Raises ValueError for fewer than two devices, more than there are, and sizes below 1.
    """

    devices: int
    kibibytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def __post_init__(self) -> None:
        if min(self.kibibytes, default=0) < 1:
            raise ValueError(f"sizes are {self.kibibytes}: expected one or more positive numbers")
        if read_devices(self.devices) is None:
            raise ValueError("devices is 1: a sum over devices needs two or more")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.dtypes) * len(self.kibibytes)


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case, and yields its row."""
    mesh = read_devices(sweep.devices)
    assert mesh is not None
    for dtype, size in itertools.product(sweep.dtypes, sweep.kibibytes):
        yield measure_case(mesh, size * 1024, dtype)


def measure_case(mesh: jax.sharding.Mesh, nbytes: int, dtype: str) -> dict[str, Any]:
    """The wall time of a sum of `nbytes` bytes over devices, in a chain inside one jit.

    XLA would replace the sum of a sum by a multiplication, since a sum is equal on all devices; so
    each device adds its own array in between. The time of the additions alone is subtracted. The
    sum is XLA's, and if the devices can have an inbox for it, also the kernel's.
    """
    count = max(nbytes // jnp.dtype(dtype).itemsize, 1)
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    own = jax.jit(lambda: jnp.zeros(count * mesh.size, dtype), out_shardings=sharding)()
    both, addition = (_microseconds(_chain(mesh, way), own) for way in ("reference", None))
    try:
        by_inbox = _microseconds(_chain(mesh, "mosaic"), own) - addition
    except UnsupportedError:
        by_inbox = None
    return {
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "dtype": dtype,
        "bytes": nbytes,
        "chain": CHAIN,
        "steps": STEPS,
        "pair_microseconds": both,
        "addition_microseconds": addition,
        "sum_microseconds": both - addition,
        "inbox_microseconds": by_inbox,
    }


def _chain(mesh: jax.sharding.Mesh, implementation: Any) -> Any:
    """The jitted chain of additions, with an implementation's sums between them, or None."""
    [axis] = mesh.axis_names

    def chain(own: jax.Array) -> jax.Array:
        inbox = open_inbox(axis, own.nbytes) if implementation == "mosaic" else None

        def links(_: int, x: jax.Array) -> jax.Array:
            for _ in range(CHAIN):
                # The barrier keeps XLA from fusing the additions into one kernel.
                x = jax.lax.optimization_barrier(x + own)
                if implementation is not None:
                    x = sum_over_devices(x, axis, inbox, implementation=implementation)
            return x

        return jax.lax.fori_loop(0, STEPS, links, own)

    divided = PartitionSpec(axis)
    return jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=divided, out_specs=divided, check_vma=False)
    )


def _microseconds(function: Any, own: jax.Array) -> float:
    """The median wall time of one link of a chain."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        function(own).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / (CHAIN * STEPS) * 1e6
