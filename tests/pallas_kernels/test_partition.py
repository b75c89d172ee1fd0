from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mpjax.kernels import QuantizedTensor, WeightFormat, partition_specs
from mpjax.kernels.packed_shapes import packed_shapes

ROOT = Path(__file__).resolve().parents[2]
MESH = AbstractMesh((2, 3, 4), ("data", "expert", "model"))


def test_products_of_shards_equal_the_whole_product():
    """In a process of its own, which has four devices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.sharded_products"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "8 formats and experts on 4 devices\n"), (
        done.stderr
    )


def shapes(text: str, *shape: int, permuted: bool = False) -> QuantizedTensor:
    format = WeightFormat.parse(text)
    scale_dtype = {
        "int8": "float32",
        "float8": "float32",
        "liquid4": "uint16",
        "float4": "bfloat16",
    }
    return packed_shapes(shape, format, scale_dtype.get(format.codes, "float16"), permuted=permuted)


def test_each_array_has_its_spec():
    specs = partition_specs(shapes("uint4:g128", 1024, 8), MESH, k="model", n="data")
    assert specs.words == PartitionSpec("model", "data", None)
    assert specs.parameters == PartitionSpec("model", "data")
    assert (specs.permutation, specs.channel_scales, specs.table) == (None, None, None)

    flat = partition_specs(shapes("int8", 1024, 8), MESH, k="model", n="data")
    assert flat.words == PartitionSpec(None, "data", "model")
    assert flat.parameters == PartitionSpec(None, "data"), "one group is everybody's"

    liquid = partition_specs(shapes("liquid4:g64", 1024, 8), MESH, n=("data", "model"))
    assert liquid.channel_scales == PartitionSpec(("data", "model"))
    table = partition_specs(
        shapes("table4:g64", 6, 7, 256, 8), MESH, n="model", leading=("expert", None)
    )
    assert table.words == PartitionSpec("expert", None, None, "model", None)
    assert table.table == PartitionSpec("expert", None, None)


def test_specs_have_the_structure_of_the_tensor():
    tensor = shapes("uint4:g32", 96, 8, permuted=True)
    specs = partition_specs(tensor, MESH, n="data")
    assert specs.permutation == PartitionSpec(None)
    assert jax.tree.structure(specs) == jax.tree.structure(tensor)
    assert jax.tree.leaves(partition_specs(tensor, MESH))[0] == PartitionSpec(None, None, None)


@pytest.mark.parametrize(
    ("tensor", "axes", "message"),
    [
        (
            shapes("uint4:g128", 640, 8),
            {"k": "data"},
            r"640 input channels can't be divided among 2 shards, as the uint4:g128 tensor pads .* "
            r"128 more.*; divide the output channels \(n\) instead",
        ),
        (shapes("uint4:g128", 512, 8, permuted=True), {"k": "data"}, "has a permutation of all"),
        (shapes("uint4:g128", 768, 8), {"k": "data"}, "in blocks of 256, which shards can't"),
        (shapes("int8", 384, 8), {"k": "data"}, "in blocks of 128, which shards can't divide"),
        (shapes("uint4:g128", 256, 9), {"n": "data"}, "9 output channels can't be .* 2 shards eq"),
        (shapes("int8", 4, 128, 8), {"leading": ("expert",)}, "4 matrices can't .* 3 shards eq"),
        (shapes("int8", 128, 8), {"leading": ("expert",)}, r"names 1 axes, and the tensor has 0"),
        (shapes("int8", 3, 128, 8), {"leading": ()}, r"names 0 axes, and the tensor has 1 in fro"),
        (
            shapes("int8", 512, 8),
            {"n": "tensor"},
            "n names 'tensor', which is no axis of the mesh, or",
        ),
        (
            shapes("int8", 512, 8),
            {"n": "data", "k": "data"},
            "k names 'data', .* twice: expected each of 'data', 'e",
        ),
        (shapes("int8", 512, 8), {"n": ("data", "data")}, "n names 'data', which is no axis of"),
    ],
)
def test_what_can_not_be_divided_is_refused(tensor, axes, message):
    with pytest.raises(ValueError, match=rf"^partition_specs: .*{message}"):
        partition_specs(tensor, MESH, **axes)


def test_one_shard_is_the_whole():
    """A permutation, and padding, need nothing of other shards where there are none."""
    mesh = AbstractMesh((1,), ("model",))
    specs = partition_specs(shapes("uint4:g32", 96, 8, permuted=True), mesh, k="model")
    assert specs.words == PartitionSpec("model", None, None)


def test_the_types_are_checked():
    with pytest.raises(ValueError, match="partition_specs: tensor is 3: expected a Quantized"):
        partition_specs(3, MESH)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="partition_specs: mesh is 'cpu': expected a Mesh or a Abs"
    ):
        partition_specs(shapes("int8", 128, 8), "cpu")  # type: ignore[arg-type]
