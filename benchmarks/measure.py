"""Kernel times from CUPTI, and the stamp that says where and with what a result was measured."""

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import mpjax.environment

RESULTS = Path(__file__).parent / "results"


def kernel_microseconds(
    function: Callable[..., Any], *arguments: Any, iterations: int = 5
) -> dict[str, float]:
    """GPU time of each kernel that one call launches, summed by name: the median over calls.

    Kernel time rather than wall time: short calls are bound by the host that launches them.
    """
    _, calls = profiler.measure(function, aggregate=False, iterations=iterations)(*arguments)
    assert calls is not None, "the call launched no kernel"
    totals = collections.defaultdict(list)
    for call in calls:
        by_name: dict[str, float] = collections.defaultdict(float)
        for name, milliseconds in call:
            by_name[name] += milliseconds * 1e3
        for name, microseconds in by_name.items():
            totals[name].append(microseconds)
    return {name: statistics.median(times) for name, times in totals.items()}


def microseconds(function: Callable[..., Any], *arguments: Any, iterations: int = 5) -> float:
    """GPU time of one call, all its kernels counted."""
    return sum(kernel_microseconds(function, *arguments, iterations=iterations).values())


def read_bandwidth() -> float:
    """Bytes per second at which an XLA reduction reads 2 GB: the practical memory roofline."""
    buffer = jnp.ones((1 << 29,), jnp.uint32)
    return buffer.nbytes / (microseconds(jax.jit(jnp.sum), buffer) * 1e-6)


def stamp() -> dict[str, Any]:
    """Device, versions and commit; GIT_COMMIT names it where a copy without history is measured."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    environment = mpjax.environment.collect()
    return {
        "device": jax.devices()[0].device_kind,
        "commit": os.environ.get("GIT_COMMIT") or found.stdout.strip() or None,
        "driver": environment["driver"],
        "versions": environment["packages"],
    }


def save(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a result, stamped, to `<folder>/<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(stamp() | result, indent=2) + "\n")
    return path
