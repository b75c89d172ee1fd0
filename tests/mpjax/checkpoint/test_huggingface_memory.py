"""How much host memory loading takes, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import pytest

from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint
from tests.mpjax.checkpoint.write_mixture import write_mixture
from tests.sweeps import in_sweep

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


def beside_the_model(folder, precision):
    """Bytes that loading takes beside the model's own, with those of the model."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder / "large", folder / "small", precision],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    measured = json.loads(done.stdout)
    extra = measured["growth"] - measured["nbytes"]
    print(f"{extra / 1e6:.0f} MB beside the model's {measured['nbytes'] / 1e6:.0f} MB")
    return extra, measured["nbytes"]


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
    extra, _ = beside_the_model(tmp_path, precision)
    assert total > 2.5e8
    assert extra < 6 * largest


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("precision", [in_sweep("W16A16KV16"), "W4A16KV16"])
def test_a_stack_is_not_in_memory_beside_its_experts(precision, tmp_path, rng):
    """A layer's stacks have 134 and 67 MB in 16 bits, of experts of 2 MB for each map."""
    write_mixture(tmp_path / "large", rng, **EXPERTS)
    write_mixture(tmp_path / "small", rng, **EXPERTS | {"num_local_experts": 4})
    extra, nbytes = beside_the_model(tmp_path, precision)
    assert nbytes > (2e8 if precision == "W16A16KV16" else 5e7)
    assert extra < 5e7


EXPERTS = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
}
# A small model comes first, for imports, compiler and allocator.
PROGRAM_OF_EXPERTS = """
import json, resource, sys
import jax
from flax import nnx
from mpjax.checkpoint import convert, huggingface
from mpjax.devices import read_devices

convert.PIECE_BYTES = 8 << 20
folder, small = sys.argv[1:]
huggingface.load(small, mesh=read_devices(8))
open("/proc/self/clear_refs", "w").write("5")
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model = huggingface.load(folder, mesh=read_devices(8))
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if "VmHWM" in line)
shards = [s for leaf in jax.tree.leaves(nnx.state(model)) for s in leaf.addressable_shards]
print(json.dumps({"growth": peak - before, "nbytes": sum(s.data.nbytes for s in shards)}))
"""


@pytest.mark.sweep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_experts_for_several_devices_are_never_all_in_memory(tmp_path, rng):
    """A layer's stacks of 128 MB and of 64 MB, of which 8 MB are whole at a time."""
    write_mixture(tmp_path / "large", rng, **EXPERTS)
    write_mixture(tmp_path / "small", rng, **EXPERTS | {"num_local_experts": 4})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_OF_EXPERTS, tmp_path / "large", tmp_path / "small"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "MALLOC_MMAP_THRESHOLD_": "262144",  # memory that is freed goes back at once
        },
    )
    measured = json.loads(done.stdout)
    extra = measured["growth"] - measured["nbytes"]
    print(f"{extra / 1e6:.0f} MB beside the model's {measured['nbytes'] / 1e6:.0f} MB")
    assert measured["nbytes"] > 1.9e8
    assert extra < 6e7
