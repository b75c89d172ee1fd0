"""Scratch: the kernel with operands of bfloat16 beside the one with 8-bit integers."""

import json

from benchmarks import early, persistent
from benchmarks import persistent_kernel as integers
from benchmarks import try_persistent_bf16 as floats

weights = early.layers_of(4)
for name, module in (("integers", integers), ("floats", floats)):
    persistent.persistent_kernel = module  # type: ignore[attr-defined]
    print(name, json.dumps(persistent.check(weights[0])), flush=True)
    for count in (3, 4, 15):
        print(name, count, persistent.kernel_time(weights, in_flight=count), flush=True)
    for count in (4, 15):
        print(name, count, json.dumps(persistent.cycles(weights, count)), flush=True)
    if name == "floats":
        for part in ("products", "copies"):
            print(name, part, persistent.kernel_time(weights, without=part), flush=True)
