"""A family's decoder in deterministic mode, divided among devices: steps and forward passes.

It needs a process of its own with several devices; test_deterministic.py runs it with the number of
devices and the name of the architecture.
"""

from __future__ import annotations

import sys

from tests.models.sharded_decoders import divide
from tests.models.sharded_families import build
from tests.models.test_deterministic import check_bits

if __name__ == "__main__":
    count, architecture = sys.argv[1:]
    check_bits(divide(build(architecture), int(count)))
    print("equal")
