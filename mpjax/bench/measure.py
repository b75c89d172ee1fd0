"""Kernel times from CUPTI, the memory roofline, and result files with versions and commit."""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import mpjax.environment
from mpjax.files.atomic_write import atomic_write
from mpjax.kernels import UnsupportedError, device

# Bytes of the arrays that are read in turn: several times the L2 cache of any current GPU.
ROTATED_BYTES = 200e6
GATE = 8e-3  # relative error of kernels in bfloat16


def require_gpu() -> None:
    """Raises UnsupportedError, with the reason, if there is no supported GPU."""
    if reason := device.why_triton_cannot_run():
        raise UnsupportedError(
            f"a benchmark measures a CUDA GPU of compute capability 8.0 or newer: {reason}"
        )


def relative_error(found: Any, exact: Any) -> float:
    """The mean absolute error of an array, divided by the mean magnitude of the exact one."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.abs(found - exact).mean() / np.abs(exact).mean())


def failures(rows: Iterable[Mapping[str, Any]], name: str, gate: float = GATE) -> list[str]:
    """A sentence for each row whose `relative_error` is NaN or not below the limit `gate`.

    name: a format string of a row's values that names the row.
    """
    return [
        f"{name.format_map(row)}: the error is {error:.1e}, and the gate is {gate:.0e}"
        for row in rows
        if (error := row["relative_error"]) is not None and not error < gate
    ]


def copies(nbytes: int) -> int:
    """The number of arrays of `nbytes` to read in turn, so that none stays in the L2 cache."""
    return max(2, math.ceil(ROTATED_BYTES / nbytes))


def kernel_microseconds(
    function: Callable[..., Any], *arguments: Any, iterations: int = 5
) -> dict[str, float]:
    """The GPU time of each kernel in a call, summed by name; the median over `iterations` calls.

    Kernel times are used because the wall time of a short call is dominated by the host's launches.
    The function is compiled by `serial_jit`, unless it is already compiled or is `Unjitted`.

    Raises RuntimeError if the call launches no kernel.
    """
    # Imported here, because the module needs CUDA, while this file is imported on any machine.
    from jax.experimental.mosaic.gpu import profiler

    if not isinstance(function, Unjitted | jax.stages.Compiled):
        function = serial_jit(function)
    _, calls = profiler.measure(function, aggregate=False, iterations=iterations)(*arguments)
    if calls is None:
        raise RuntimeError("nothing to measure: the call launched no kernel")
    if iterations == 1:  # then the profiler returns one call, not a list of calls
        calls = cast(list[list[tuple[str, float]]], [calls])
    totals = collections.defaultdict(list)
    for call in calls:
        by_name: dict[str, float] = collections.defaultdict(float)
        for name, milliseconds in call:
            by_name[name] += milliseconds * 1e3
        for name, microseconds in by_name.items():
            totals[name].append(microseconds)
    return {name: statistics.median(times) for name, times in totals.items()}


def compiled(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """Compiles a function for arguments of these shapes, as `kernel_microseconds` does."""
    return serial_jit(function).lower(*arguments).compile()


def serial_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit(function, **options)` without early launches (programmatic dependent launch).

    The time of an early-launched kernel would include its wait for the previous kernel.
    """
    return jax.jit(function, compiler_options={"xla_gpu_enable_pdl": False}, **options)


class Unjitted(jax.stages.Wrapped):
    """A function that `kernel_microseconds` calls without compiling it.

    So the function may call compiled functions that donate arguments. It is called once more than
    it is measured, and must keep its own state between calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the function and returns its result."""
        return self._function(*arguments, **keywords)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Raises TypeError: an Unjitted function is never traced."""
        raise TypeError("an Unjitted function can only be called")

    lower = trace


def microseconds(function: Callable[..., Any], *arguments: Any, iterations: int = 5) -> float:
    """The GPU time of one call in microseconds, summed over its kernels."""
    return sum(kernel_microseconds(function, *arguments, iterations=iterations).values())


def merge_names(kernels: Mapping[str, float], calls: int = 1) -> dict[str, float]:
    """Kernel times / `calls`, merged by name without XLA's numeric suffix, longest first."""
    merged: dict[str, float] = collections.defaultdict(float)
    for name, time in kernels.items():
        merged[re.sub(r"(_+\d+)+$", "", name)] += time / calls
    return dict(sorted(merged.items(), key=lambda item: -item[1]))


def flat_bytes(tree: Any) -> jax.Array:
    """All bytes of a pytree as uint32 [bytes / 4], zero-padded to whole words."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree)]
    parts = [jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1) for leaf in leaves]
    joined = jnp.concatenate(parts)
    joined = jnp.pad(joined, (0, -joined.size % 4))
    return jax.lax.bitcast_convert_type(joined.reshape(-1, 4), jnp.uint32)


def floor_microseconds(trees: list[Any], nbytes: int | None = None) -> float:
    """The time in which one XLA reduction reads all bytes of a tree, in microseconds.

    It is a lower bound for any kernel that reads these bytes. The trees are read in turn.

    nbytes: the number of bytes to read of each tree; None for all.
    """
    words = None if nbytes is None else -(-nbytes // 4)
    flat = jax.jit(lambda tree: flat_bytes(tree)[:words])
    arrays = [flat(tree) for tree in trees]
    read = jax.jit(lambda arrays: [array.sum(dtype=jnp.uint32) for array in arrays])
    return microseconds(read, arrays) / len(arrays)


def update_microseconds(arrays: list[jax.Array]) -> float:
    """The time in which an XLA kernel reads and rewrites one of `arrays`, in microseconds.

    arrays: float arrays of one shape, which are updated in turn.
    """
    update = jax.jit(lambda arrays: [array * 0.5 for array in arrays])
    return microseconds(update, arrays) / len(arrays)


def read_bandwidth() -> float:
    """The practical memory bandwidth: bytes per second of an XLA reduction over 2 GB."""
    buffer = jnp.ones((1 << 29,), jnp.uint32)
    return buffer.nbytes / (microseconds(jax.jit(jnp.sum), buffer) * 1e-6)


@functools.cache
def stamp() -> dict[str, Any]:
    """The device, versions, commit and command of a result; GIT_COMMIT overrides the commit."""
    environment = mpjax.environment.collect()
    return {
        "device": device.default_device().device_kind,
        "commit": os.environ.get("GIT_COMMIT") or _commit(Path(__file__).parents[2]),
        "driver": environment["driver"],
        "versions": environment["packages"],
        "command": mpjax.environment.command_line(),
    }


def _commit(root: Path) -> str | None:
    """The commit of the checkout at `root`; None if it is no checkout, as in a wheel."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return found.stdout.strip() or None


def results_folder() -> Path:
    """The default folder of results: benchmarks/results of a checkout, else the current folder."""
    folder = Path("benchmarks/results")
    return folder if folder.is_dir() else Path()


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes a result with its `stamp` to `<folder>/<name>.json`, and returns the path.

    folder: `results_folder()` unless given.
    """
    folder = results_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    atomic_write(path, json.dumps(stamp() | result, indent=2) + "\n")
    return path
