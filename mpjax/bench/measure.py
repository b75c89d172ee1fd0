"""Kernel times from CUPTI, and the stamp that says where and with what a result was measured."""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

import mpjax.environment
from mpjax.atomic_write import atomic_write
from mpjax.kernels import UnsupportedError, device

ROTATED_BYTES = 200e6  # arrays read in turn, together several times the L2 cache of any GPU so far


def require_gpu() -> None:
    """Raises UnsupportedError, with the reason, where there is no GPU that can be measured."""
    if reason := device.why_triton_cannot_run():
        raise UnsupportedError(
            f"a benchmark measures a CUDA GPU of compute capability 8.0 or newer: {reason}"
        )


def copies(nbytes: int) -> int:
    """How many arrays of `nbytes` to read in turn, so that none is still in the L2 cache."""
    return max(2, math.ceil(ROTATED_BYTES / nbytes))


def kernel_microseconds(
    function: Callable[..., Any], *arguments: Any, iterations: int = 5
) -> dict[str, float]:
    """GPU time of each kernel that one call launches, summed by name: the median over calls.

    Kernel time rather than wall time: short calls are bound by the host that launches them. Kernels
    run one by one, but those of a function that is `Unjitted` or compiled otherwise. Raises
    RuntimeError where the call launches no kernel.
    """
    # Imported here: the module is for CUDA, and this one is imported on any machine.
    from jax.experimental.mosaic.gpu import profiler

    if not isinstance(function, Unjitted | jax.stages.Compiled):
        function = one_by_one(function)
    _, calls = profiler.measure(function, aggregate=False, iterations=iterations)(*arguments)
    if calls is None:
        raise RuntimeError("nothing to measure: the call launched no kernel")
    if iterations == 1:  # a single call comes without the list around it
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
    """A function of such arguments, as `kernel_microseconds` measures it: compiled once for all."""
    return one_by_one(function).lower(*arguments).compile()


def one_by_one(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit(function, **options)`, of which no kernel begins before the last one has ended.

    Kernels that are launched early wait for those before them: their times would overlap.
    """
    return jax.jit(function, compiler_options={"xla_gpu_enable_pdl": False}, **options)


class Unjitted(jax.stages.Wrapped):
    """A function that is measured as it is, where any other would be put under `jit` first.

    What it calls may then be compiled already, and may take over the buffers of its arguments: give
    it a state to go on from, for it is called once more than it is measured.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the function returns."""
        return self._function(*arguments, **keywords)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Raises TypeError: there is nothing to trace."""
        raise TypeError("an Unjitted function can only be called")

    lower = trace


def microseconds(function: Callable[..., Any], *arguments: Any, iterations: int = 5) -> float:
    """GPU time of one call, all its kernels counted."""
    return sum(kernel_microseconds(function, *arguments, iterations=iterations).values())


def merge_names(kernels: Mapping[str, float], calls: int = 1) -> dict[str, float]:
    """Kernel times per call, without the numbers that XLA appends; the longest first."""
    merged: dict[str, float] = collections.defaultdict(float)
    for name, time in kernels.items():
        merged[re.sub(r"(_+\d+)+$", "", name)] += time / calls
    return dict(sorted(merged.items(), key=lambda item: -item[1]))


def flat_bytes(tree: Any) -> jax.Array:
    """All bytes of a pytree as one array uint32 [bytes / 4], the last word padded with zeros."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree)]
    parts = [jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1) for leaf in leaves]
    joined = jnp.concatenate(parts)
    joined = jnp.pad(joined, (0, -joined.size % 4))
    return jax.lax.bitcast_convert_type(joined.reshape(-1, 4), jnp.uint32)


def floor_microseconds(trees: list[Any], nbytes: int | None = None) -> float:
    """Time in which an XLA reduction reads the bytes of one of `trees`, each of them read in turn.

    One reduction over one array, however many leaves hold the bytes: what a kernel could reach that
    does nothing but read them. nbytes: how many of each, where not all.
    """
    words = None if nbytes is None else -(-nbytes // 4)
    flat = jax.jit(lambda tree: flat_bytes(tree)[:words])
    arrays = [flat(tree) for tree in trees]
    read = jax.jit(lambda arrays: [array.sum(dtype=jnp.uint32) for array in arrays])
    return microseconds(read, arrays) / len(arrays)


def read_bandwidth() -> float:
    """Bytes per second at which an XLA reduction reads 2 GB: the practical memory roofline."""
    buffer = jnp.ones((1 << 29,), jnp.uint32)
    return buffer.nbytes / (microseconds(jax.jit(jnp.sum), buffer) * 1e-6)


@functools.cache
def stamp() -> dict[str, Any]:
    """Device, versions and commit; GIT_COMMIT names it where a copy without history is measured."""
    environment = mpjax.environment.collect()
    return {
        "device": device.default_device().device_kind,
        "commit": os.environ.get("GIT_COMMIT") or _commit(Path(__file__).parents[2]),
        "driver": environment["driver"],
        "versions": environment["packages"],
    }


def _commit(root: Path) -> str | None:
    """The commit of a checkout; None for an installed package, wherever it is called from."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return None
    return found.stdout.strip() or None


def results_folder() -> Path:
    """Where results go by default: benchmarks/results of a checkout, else the current folder."""
    folder = Path("benchmarks/results")
    return folder if folder.is_dir() else Path()


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes a result, stamped, to `<folder>/<name>.json`; to `results_folder()` by default."""
    folder = results_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    atomic_write(path, json.dumps(stamp() | result, indent=2) + "\n")
    return path
