"""Weights divided into parts and among devices."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from mpjax.kernels import (
    PlainCodes,
    QuantizedTensor,
    WeightFormat,
    matmul,
    pack,
    partition_specs,
    quantize,
)
from mpjax.kernels.cutting import (
    Run,
    cut_inputs,
    cut_outputs,
    join_inputs,
    join_outputs,
    require_cuttable,
)
from mpjax.kernels.packed_shapes import packed_shapes
from tests.sweeps import combinations

OUTPUTS = 24
HALVES = [Run(0, 512, 512), Run(512, 1024, 512)]
UNEVEN = [Run(0, 512, 512), Run(512, 768, 512), Run(768, 768, 512)]  # the last part has nothing
SMALL = [Run(64 * i, 64 * i + 64, 64) for i in range(4)]  # less than a block, and than most groups
FORMATS = (
    *("uint4:g128", "uint4:gK:sym", "uint8:g32", "table3:g64", "float8:g128", "float8:gK/float8"),
    *("int8:gK/int8", "liquid4:g64/int8"),
)


@jax.jit
def dequantize(weight: QuantizedTensor) -> jax.Array:
    return weight.dequantize()


def weight(text: str, channels: int) -> QuantizedTensor:
    rng = np.random.default_rng(0)
    return quantize(jnp.asarray(rng.standard_normal((channels, OUTPUTS)), jnp.float32), text)


def require_equal(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.one_of(4)
@combinations(1, text=FORMATS, runs=(HALVES, UNEVEN, SMALL))
def test_parts_along_k_have_the_same_weights_and_are_joined_bit_for_bit(text, runs):
    whole = weight(text, max(run.end for run in runs))
    parts = [cut_inputs(whole, runs, number) for number in range(len(runs))]
    expected = dequantize(whole)
    for part, run in zip(parts, runs, strict=True):
        assert part.shape == (run.size, OUTPUTS)
        assert part.padding == parts[0].padding
        found = dequantize(part)[: run.length]
        np.testing.assert_array_equal(found, expected[run.begin : run.end])
    require_equal(join_inputs(parts, runs, whole.format), whole)


@pytest.mark.parametrize("text", ["uint4:g32", "liquid4:g64/int8"])
def test_parts_along_n_end_with_zeros_and_are_joined_bit_for_bit(text):
    whole = weight(text, 128)
    runs = [[Run(0, 5, 8), Run(12, 17, 8)], [Run(5, 12, 8), Run(17, 24, 8)]]
    parts = [cut_outputs(whole, each) for each in runs]
    found = np.asarray(parts[0].dequantize())
    expected = np.asarray(whole.dequantize())
    np.testing.assert_array_equal(found[:, :5], expected[:, :5])
    np.testing.assert_array_equal(found[:, 8:13], expected[:, 12:17])
    assert not found[:, 5:8].any()
    require_equal(join_outputs(parts, runs), whole)


def test_a_permutation_has_the_places_of_channels_in_the_x_of_all_parts():
    rng = np.random.default_rng(0)
    order = rng.permutation(96).astype(np.int32)
    codes = jnp.asarray(rng.integers(0, 16, (96, 8)), jnp.uint8)
    scales = jnp.asarray(rng.uniform(0.1, 1, (3, 8)), jnp.float16)
    whole = pack(PlainCodes(WeightFormat("uint4", 32, True), codes, scales, permutation=order))
    runs = [Run(0, 64, 64), Run(64, 96, 64)]
    parts = [cut_inputs(whole, runs, number) for number in range(2)]
    x = jnp.asarray(rng.standard_normal((2, 96)), jnp.float32)
    everybody = jnp.pad(x, ((0, 0), (0, 32)))  # the second part's x ends with zeros
    found = sum(
        matmul(everybody[:, part.permutation], dataclasses.replace(part, permutation=None))
        for part in parts
    )
    np.testing.assert_allclose(found, matmul(x, whole), rtol=1e-4, atol=1e-4)
    require_equal(join_inputs(parts, runs, whole.format), whole)


def in_blocks(channels: int, order: np.ndarray | None = None) -> QuantizedTensor:
    """A weight whose groups meet activations in 4 and 8 bits by turns."""
    rng = np.random.default_rng(0)
    groups = -(-channels // 128)
    return pack(
        PlainCodes(
            WeightFormat("int4", 128),
            jnp.asarray(rng.integers(-7, 8, (channels, OUTPUTS)), jnp.int8),
            jnp.asarray(rng.uniform(0.1, 1, (groups, OUTPUTS)), jnp.float32),
            permutation=order,
            activation_bits=jnp.asarray([4, 8, 8, 4, 4, 8, 4, 4][:groups], jnp.uint8),
        )
    )


@pytest.mark.one_of(3)
@combinations(1, size=[512, 384, 128], is_ordered=[False, True])
def test_blocks_of_activations_keep_their_bits(size, is_ordered):
    """Parts round x as the whole does, to the bit: shares of whole blocks have the same scales."""
    channels = 640
    order = np.random.default_rng(1).permutation(channels).astype(np.int32)
    whole = in_blocks(channels, order if is_ordered else None)
    ends = [min(size * i, channels) for i in range(-(-channels // size) + 2)]
    runs = [Run(begin, end, size) for begin, end in itertools.pairwise(ends)]
    parts = [cut_inputs(whole, runs, number) for number in range(len(runs))]
    assert {part.activation_bits.shape for part in parts} == {(size // 128,)}
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, channels)), jnp.float32)
    everybody = jnp.pad(x, ((0, 0), (0, len(runs) * size - channels)))
    found = jnp.zeros((2, OUTPUTS))
    for number, part in enumerate(parts):
        mine = everybody[:, number * size : number * size + size]
        if is_ordered:
            mine = everybody[:, part.permutation]
        found += matmul(mine, dataclasses.replace(part, permutation=None))
    np.testing.assert_allclose(found, matmul(x, whole), rtol=1e-4, atol=1e-4)
    require_equal(join_inputs(parts, runs, whole.format), whole)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("uint4:g128", "a weight format with smaller groups"),
        ("liquid4:g64/int8", "another weight format, as liquid4 has groups of 64 alone"),
        ("int4:g128/int8", "another weight format, as int4 has groups of 128 alone"),
        ("float8:g128", "a weight format with smaller groups"),
    ],
)
def test_parts_without_whole_groups_are_refused(text, advice):
    runs = [Run(0, 80, 80), Run(80, 160, 80)]
    format = WeightFormat.parse(text)
    message = rf"160 input channels .* 2 parts of 80, .* fewer parts \(devices\), or {advice}"
    with pytest.raises(ValueError, match=message):
        require_cuttable(format, runs)


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
