"""Collects facts on the machine for bug reports: versions, driver, devices, settings."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

REQUIRED = (
    *("jax", "jaxlib", "flax", "tokenizers", "safetensors"),
    *("numpy", "ml-dtypes"),
)
# JAX loads the CUDA libraries from these wheels, not from the system.
CUDA = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cublas-cu12", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cublas", "nvidia-cudnn-cu13"),
)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_TF32_OVERRIDE")
VARIABLE_PREFIXES = ("JAX_", "XLA_", "MPJAX_")


def collect() -> dict[str, Any]:
    """Facts by section, as JSON-compatible values.

    Raises nothing, since bug reports are written on broken machines: a failed section holds its
    error as a sentence. Listing the devices starts JAX's backend, which allocates GPU memory as JAX
    is configured to.
    """
    return {
        "system": _attempt(_system),
        "packages": _attempt(_packages),
        "driver": _attempt(_driver),
        "devices": _attempt(_devices),
        "kernels": _attempt(_kernels),
        "tuning_tables": _attempt(_tuning_tables),
        "variables": _attempt(_variables),
    }


def command_line() -> str:
    """The command line of this process, without its --output option."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    module = getattr(specification, "name", "").removesuffix(".__main__")
    program = f"python -m {module}" if module else Path(sys.argv[0]).name
    words = re.sub(r" --output[ =](\S+|'[^']*')", "", f" {shlex.join(sys.argv[1:])}")
    return program + words.rstrip()


def report() -> str:
    """The facts of `collect` as text for a bug report, one per line."""
    lines = []
    for section, facts in collect().items():
        lines.append(section.replace("_", " "))
        if isinstance(facts, dict):
            width = max(map(len, facts), default=0)
            lines += [f"  {name:{width}}  {fact}" for name, fact in facts.items()]
        elif isinstance(facts, list):
            lines += [f"  {_describe(fact)}" for fact in facts]
        else:
            lines.append(f"  {facts}")
        if not facts:
            lines.append("  none")
    return "\n".join(lines)


def _attempt(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:
        return f"could not be found out: {type(error).__name__}: {error}"


def _system() -> dict[str, str]:
    facts = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    with contextlib.suppress(OSError, KeyError):  # not a Linux distribution
        facts["distribution"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    return facts


def _packages() -> dict[str, str]:
    import mpjax

    return {
        "mpjax": mpjax.__version__,
        **{name: _version(name) or "not installed" for name in REQUIRED},
        **{name: version for name in CUDA if (version := _version(name))},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> list[dict[str, str]] | str:
    fields = ("name", "driver_version", "memory.total", "compute_cap")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "no NVIDIA driver: nvidia-smi is not on the PATH"
    if done.returncode:
        return f"nvidia-smi failed: {(done.stdout + done.stderr).strip()}"
    rows = (line.split(", ") for line in done.stdout.strip().splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _devices() -> list[dict[str, Any]]:
    import jax

    return [
        {
            "device": str(device),
            "kind": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
            "memory_bytes": (_memory_statistics(device) or {}).get("bytes_limit"),
        }
        for device in jax.devices()
    ]


def _memory_statistics(device: Any) -> dict[str, int] | None:
    """The allocator's statistics; None for a backend without them, such as the CPU's."""
    try:
        return device.memory_stats()
    except (
        Exception
    ):  # jaxlib raises its own error type, and the device is worth listing without it
        return None


def _kernels() -> dict[str, str]:
    """Whether each Pallas backend can run here, by its name in `implementation=`."""
    from mpjax.kernels import device
    from mpjax.kernels.gemm.plans import why_no_wgmma

    reason = device.why_triton_cannot_run()
    reasons = {"triton": reason, "mosaic": reason or why_no_wgmma(device.limits())}
    yes = f"yes: compute capability {device.compute_capability()}"
    found = {name: f"no: {reason}" if reason else yes for name, reason in reasons.items()}
    if found["mosaic"] == yes:
        from mpjax.kernels.mosaic.launch import why_slow  # imported late, because it is slow

        slow = why_slow()
        found["mosaic"] += f"; {slow}" if slow else ""
    return found


def _tuning_tables() -> dict[str, str] | str:
    """The number of plans in each tuning table, in look-up order."""
    from mpjax.kernels import device
    from mpjax.kernels.attention import plans as of_attention
    from mpjax.kernels.experts import plans as of_experts
    from mpjax.kernels.gemm import plans as of_products
    from mpjax.kernels.plans import tables

    kind = device.kind()
    plans: dict[str, int] = {}
    for operation in (of_products, of_attention, of_experts):
        for path, table in tables.in_use(operation.OPERATION, kind):
            plans[str(path)] = plans.get(str(path), 0) + len(table.entries)
    if plans:
        used = {path: f"{count} plans" for path, count in plans.items()}
        return used | {"anything else": "heuristics"}
    if tables.own_folder() is None:
        return f"none, because {tables.VARIABLE} is empty: heuristics"
    return f"none for {kind!r}: heuristics (`mpjax tune` makes a table)"


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
    }


def _describe(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact is not None)
