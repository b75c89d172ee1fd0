"""An engine of a model in deterministic mode that is divided among two devices.

It needs a process of its own with several devices; test_deterministic.py runs it with the folder
of a model.
"""

from __future__ import annotations

import sys

import jax

import mpjax
from tests.mpjax.rollouts.test_deterministic import check_uneven

if __name__ == "__main__":
    precision, two = "W4A16KV8", jax.devices()[:2]
    check_uneven(
        mpjax.load(sys.argv[1], precision=precision, dtype="bf16", devices=two, deterministic=True)
    )
    print("equal")
