"""How much memory a device has left, asked before anything is allocated on it."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from mpjax.kernels.device import default_device

GIGABYTE = 1e9


class DeviceMemoryError(MemoryError):
    """Something needs more memory than the device has left; the message gives both figures."""


def free_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes that JAX can still allocate on a device, the default one unless given.

    On a GPU this is what is left of the share that JAX is allowed to take (three quarters of the
    GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise); on a CPU, what the system has
    available. None where nobody knows.
    """
    device = device or default_device()
    if device.platform == "cpu":
        return _available_system_bytes()
    try:
        statistics = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a backend that doesn't keep them
        return None
    if "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def has_free(needed_bytes: int, device: jax.Device | None = None) -> bool:
    """Whether a device has `needed_bytes` left, or nobody knows."""
    free = free_bytes(device or default_device())
    return free is None or needed_bytes <= free


def require_free(needed_bytes: int, what: str, device: jax.Device | None = None) -> None:
    """Raises DeviceMemoryError unless a device has `needed_bytes` left, or nobody knows.

    what: what needs them, as the sentence's subject: "the weights of Qwen3-8B".
    """
    device = device or default_device()
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise DeviceMemoryError(
            f"{what} needs {needed_bytes / GIGABYTE:.2f} GB on {device}, which has "
            f"{free / GIGABYTE:.2f} GB free: choose a lower precision, or free memory there"
        )


def _available_system_bytes() -> int | None:
    # Linux: what can be had without swapping, page cache included. Elsewhere: pages that are free.
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
