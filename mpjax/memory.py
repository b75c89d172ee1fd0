"""Checks a device's free memory before anything is allocated on it."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from mpjax.kernels.device import default_device

GIGABYTE = 1e9


class DeviceMemoryError(MemoryError):
    """A device has less free memory than is needed; the message gives both figures."""


def free_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes that JAX can still allocate on a device, by default the default device.

    On a GPU, what is left of JAX's share (three quarters of the GPU, or
    XLA_PYTHON_CLIENT_MEM_FRACTION); on a CPU, the system's available memory. None if unknown.
    """
    device = device or default_device()
    if device.platform == "cpu":
        return _available_system_bytes()
    try:
        statistics = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a backend without statistics
        return None
    if "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def has_free(needed_bytes: int, device: jax.Device | None = None) -> bool:
    """Whether a device has `needed_bytes` free; True if unknown."""
    free = free_bytes(device or default_device())
    return free is None or needed_bytes <= free


def require_free(needed_bytes: int, what: str, device: jax.Device | None = None) -> None:
    """Raises DeviceMemoryError if a device is known to have less than `needed_bytes` free.

    what: the subject of the message, such as "loading Qwen3-8B".
    """
    device = device or default_device()
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise DeviceMemoryError(
            f"{what} needs {needed_bytes / GIGABYTE:.2f} GB on {device}, which has "
            f"{free / GIGABYTE:.2f} GB free: choose a lower precision, or free memory there"
        )


def has_free_on(mesh: jax.sharding.Mesh | None, needed_bytes: int) -> bool:
    """Whether each device has its share of `needed_bytes` free; True if unknown.

    mesh: the devices; None for the default device.
    """
    if mesh is None:
        return has_free(needed_bytes)
    return all(has_free(-(-needed_bytes // mesh.size), device) for device in mesh.local_devices)


def free_bytes_on(mesh: jax.sharding.Mesh | None) -> int | None:
    """Bytes that are free on each device of a mesh, or on the default device; None if unknown."""
    if mesh is None:
        return free_bytes()
    found = [free_bytes(device) for device in mesh.local_devices]
    known = [free for free in found if free is not None]
    return min(known) if len(known) == len(found) else None


def require_free_on(
    mesh: jax.sharding.Mesh | None, needed_bytes: int, what: str, on_default: int = 0
) -> None:
    """Raises DeviceMemoryError if a device is known to have too little free memory.

    mesh: the devices among which `needed_bytes` are divided; None for the default device.
    on_default: additional bytes on the default device.
    """
    first = default_device()
    if mesh is None:
        require_free(needed_bytes + on_default, what, first)
        return
    for device in mesh.local_devices:
        share = -(-needed_bytes // mesh.size)
        require_free(share + (on_default if device == first else 0), what, device)


def _available_system_bytes() -> int | None:
    # On Linux, memory that is available without swapping, page cache included; elsewhere, free
    # pages.
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
