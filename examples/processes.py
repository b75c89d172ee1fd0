"""Generates with a model that is divided among the devices of several processes.

Start it once for each process, with the address of the first, their number and its own:

    python examples/processes.py localhost:12355 2 0 &
    python examples/processes.py localhost:12355 2 1

On hosts with GPUs, each process has those of its host. Without GPUs, each has two CPU devices here.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax

import mpjax

coordinator, processes, process, *folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, int(processes), int(process))
lm = mpjax.load(
    folder[0] if folder else mpjax.bundled_model(),
    precision="W4A16KV8",
    devices=jax.device_count(),
    progress=False,
)
found = mpjax.generate(
    lm, ["def __init__(self, "], max_new_tokens=16, sampling={"temperature": 0.7, "top_p": 0.9}
)
print(f"{len(jax.local_devices())} of {lm.devices} devices: {found.text[0]!r}")
