"""Runs a module of tests in a process of its own, which has eight CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(module: str, *arguments: str) -> str:
    """What the module prints; AssertionError with its errors where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
