"""Benchmark of sums over devices (`psum`), as two follow each layer of a divided model."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.devices import read_devices
from mpjax.kernels import sum_over_devices

CHAIN = 64  # operations, one after the other, inside one jit
ROUNDS = 11  # the first compiles, and is not counted
# The largest difference from XLA's sum, over the largest sum: roundings in another order.
GATES = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5}
HEADERS = ("devices", "dtype", "size", "sum and addition", "addition", "sum", "GB/s")


def _exchange(x: jax.Array, axis: str) -> jax.Array:
    """The sum of what all other devices send to this one."""
    count, total = jax.lax.axis_size(axis), x
    for distance in range(1, count):
        pairs = [(device, (device + distance) % count) for device in range(count)]
        total = total + jax.lax.ppermute(x, axis, pairs)
    return total


def _scatter(x: jax.Array, axis: str) -> jax.Array:
    """Each device sums a part of x, and sends it to all others."""
    return jax.lax.all_gather(jax.lax.psum_scatter(x, axis, tiled=True), axis, tiled=True)


def _peer(x: jax.Array, axis: str, mesh: jax.sharding.Mesh) -> jax.Array:
    """The sum by the kernel of this project."""
    return sum_over_devices(x, axis, mesh=mesh, implementation="mosaic")


# Ways to add an array x over devices, as functions of x, the name of their axis, and their mesh.
WAYS: Mapping[str, Callable[[jax.Array, str, jax.sharding.Mesh], jax.Array]] = {
    "psum": lambda x, axis, mesh: jax.lax.psum(x, axis),
    "gather": lambda x, axis, mesh: jax.lax.all_gather(x, axis).sum(0),
    "exchange": lambda x, axis, mesh: _exchange(x, axis),
    "scatter": lambda x, axis, mesh: _scatter(x, axis),
    "peer": _peer,
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of a benchmark: every way and dtype with every size in KiB, on so many devices.

    ways: of WAYS. options: names and values of XLA's options for the compilation of all cases.

    Raises ValueError for less than two devices, more than there are, sizes below 1, and another
    way.
    """

    devices: int
    kibibytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    ways: tuple[str, ...] = ("psum",)
    options: tuple[tuple[str, bool | int | str], ...] = ()

    def __post_init__(self) -> None:
        if min(self.kibibytes, default=0) < 1:
            raise ValueError(f"sizes are {self.kibibytes}: expected one or more positive numbers")
        if unknown := [way for way in self.ways if way not in WAYS]:
            raise ValueError(f"unknown way {unknown[0]!r}: expected {' or '.join(WAYS)}")
        if read_devices(self.devices) is None:
            raise ValueError("devices is 1: a sum over devices needs two or more")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.ways) * len(self.dtypes) * len(self.kibibytes)


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case, and yields its row."""
    mesh = read_devices(sweep.devices)
    assert mesh is not None
    cases = itertools.product(sweep.ways, sweep.dtypes, sweep.kibibytes)
    for way, dtype, size in cases:
        yield measure_case(mesh, size * 1024, dtype, way, dict(sweep.options))


def measure_case(
    mesh: jax.sharding.Mesh,
    nbytes: int,
    dtype: str,
    way: str = "psum",
    options: dict[str, bool | int | str] | None = None,
) -> dict[str, Any]:
    """The wall time of a sum of `nbytes` bytes of each device, in a chain inside one jit.

    XLA would replace the sum of a sum by a multiplication, as it is the same on all devices; so
    each device adds an array of its own in between. The time of additions alone is subtracted.
    """
    count = max(nbytes // jnp.dtype(dtype).itemsize, 1)
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    own = jax.jit(lambda: jnp.zeros(count * mesh.size, dtype), out_shardings=sharding)()
    both, addition = (
        _microseconds(_chain(mesh, each).lower(own).compile(compiler_options=options or {}), own)
        for each in (way, None)
    )
    return {
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "way": way,
        "compiler_options": options or {},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "dtype": dtype,
        "bytes": nbytes,
        "chain": CHAIN,
        "pair_microseconds": both,
        "addition_microseconds": addition,
        "sum_microseconds": both - addition,
        "difference": 0.0 if way == "psum" else _difference(mesh, count, dtype, way),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of HEADERS."""
    way = row.get("way", "psum")
    return [
        str(row["devices"]),
        row["dtype"] + ("" if way == "psum" else f", {way}"),
        f"{row['bytes'] / 1024:.0f} KiB",
        f"{row['pair_microseconds']:.1f} µs",
        f"{row['addition_microseconds']:.1f} µs",
        f"{row['sum_microseconds']:.1f} µs",
        f"{row['bytes'] / max(row['sum_microseconds'], 1e-3) / 1e3:.1f}",
    ]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ways and sizes whose sums are not those of XLA."""
    return [
        f"{row['way']} of {row['bytes']} bytes in {row['dtype']} differs from psum by "
        f"{row['difference']:.1e}"
        for row in rows
        if not row.get("difference", 0.0) <= GATES[row["dtype"]]
    ]


def _difference(mesh: jax.sharding.Mesh, count: int, dtype: str, way: str) -> float:
    """The largest difference of a way's sums of random arrays from psum's, over the largest sum."""
    divided = PartitionSpec(*mesh.axis_names)
    noise = np.random.default_rng(0).standard_normal(count * mesh.size)
    x = jax.device_put(jnp.asarray(noise, dtype), NamedSharding(mesh, divided))

    [axis] = mesh.axis_names

    def total(way: str) -> np.ndarray:
        def add(x: jax.Array) -> jax.Array:
            return WAYS[way](x, axis, mesh)

        run = jax.shard_map(add, mesh=mesh, in_specs=divided, out_specs=divided, check_vma=False)
        return np.asarray(jax.jit(run)(x), np.float32)

    expected = total("psum")
    return float(np.abs(total(way) - expected).max() / np.abs(expected).max())


def _chain(mesh: jax.sharding.Mesh, way: str | None) -> Any:
    """The jitted chain of additions, with sums over devices between them unless `way` is None."""
    [axis] = mesh.axis_names

    def chain(own: jax.Array) -> jax.Array:
        x = own
        for _ in range(CHAIN):
            # The barrier keeps XLA from joining additions into one kernel.
            x = jax.lax.optimization_barrier(x + own)
            x = x if way is None else WAYS[way](x, axis, mesh)
        return x

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
    return statistics.median(seconds[1:]) / CHAIN * 1e6
