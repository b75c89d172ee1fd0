"""How much host memory loading takes, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import pytest

from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]
# The largest tensor is an embedding of 16 MB; all together take 300 MB.
SIZES = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# Device memory is host memory on a CPU: what the finished model takes is subtracted.
PROGRAM = """
import json, resource, sys
import jax
from flax import nnx
from mpjax.checkpoint import huggingface
from mpjax.precision import Precision

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize()

folder, small, precision = sys.argv[1:]
precision = Precision.parse(precision)
huggingface.load(small, precision=precision)  # imports, compiler and allocator
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = resident()
model = huggingface.load(folder, precision=precision)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if "VmHWM" in line)
nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
print(json.dumps({"growth": peak - before, "nbytes": nbytes}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("precision", ["W16A16KV16", "W4A16KV16"])
def test_host_memory_is_bounded_by_the_largest_tensors(precision, tmp_path, rng):
    hf = LLAMA | SIZES
    tensors = random_tensors(hf, rng, ml_dtypes.bfloat16)
    total = sum(array.nbytes for array in tensors.values())
    largest = max(array.nbytes for array in tensors.values())
    write_checkpoint(tmp_path / "large", hf, tensors, 4)
    hf = hf | {"num_hidden_layers": 1}
    write_checkpoint(tmp_path / "small", hf, random_tensors(hf, rng, ml_dtypes.bfloat16))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "large", tmp_path / "small", precision],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    measured = json.loads(done.stdout)
    extra = measured["growth"] - measured["nbytes"]
    print(
        f"{precision}: {total / 1e6:.0f} MB in the file, {largest / 1e6:.0f} MB the largest; "
        f"{extra / 1e6:.0f} MB beside the model's {measured['nbytes'] / 1e6:.0f} MB"
    )
    assert total > 2.5e8
    assert extra < 6 * largest
