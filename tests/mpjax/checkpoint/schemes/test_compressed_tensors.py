from __future__ import annotations

import pytest

from mpjax.checkpoint.schemes import compressed_tensors
from mpjax.checkpoint.schemes.compressed_tensors import FLOATS, INTEGERS, NAIVE, PACKED
from mpjax.checkpoint.schemes.reader import Activations
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.write_checkpoint import FP8, compressed_fp8, compressed_integers


@pytest.mark.parametrize(
    ("written", "layout"),
    [
        (compressed_integers(), PACKED),
        (compressed_integers(INTEGERS), INTEGERS),
        (compressed_integers(INTEGERS) | {"format": NAIVE}, INTEGERS),
        (compressed_fp8("channel", "token"), FLOATS),
        (compressed_fp8("channel", None), FLOATS),
        ({"quant_method": "compressed-tensors", "format": NAIVE, "config_groups": [3]}, FLOATS),
        (FP8, None),
        ({}, None),
    ],
)
def test_layouts(written, layout):
    found = [
        one for one in (PACKED, INTEGERS, FLOATS) if compressed_tensors.is_layout(written, one)
    ]
    assert found == ([] if layout is None else [layout])


@pytest.mark.parametrize("format", [None, "mxfp8-quantized", "mixed-precision", ["x"]])
def test_other_layouts(format):
    written = {"quant_method": "compressed-tensors", "format": format}
    message = r"compressed-tensors checkpoint: format is .*: expected 'pack-quantized' or 'int-quan"
    with pytest.raises(CheckpointError, match=message):
        compressed_tensors.is_layout(written, PACKED)


def test_what_is_written_is_sound():
    weights = compressed_tensors.write_weights(4, "int", "group", group_size=32)
    activations = compressed_tensors.write_activations("int", Activations("int8"))
    group = compressed_tensors.write_group(weights, activations, ["a"])
    written = compressed_tensors.write(PACKED, [group], ["lm_head"], "tensor")
    assert compressed_tensors.read_groups(written, (PACKED,), "x") == {"group_0": group}
    assert compressed_tensors.has_cache_scales(written)
    found = compressed_tensors.describe_activations(group, "x")
    assert found == "8-bit int with dynamic scales (strategy 'token')"
    group["input_activations"] = compressed_tensors.write_activations(
        "float", Activations("float8"), 128
    )
    found = compressed_tensors.describe_activations(group, "x")
    assert found == "8-bit float with dynamic scales (groups of 128)"
    group["input_activations"] = compressed_tensors.write_activations(
        "int", Activations("int8", is_static=True)
    )
    found = compressed_tensors.describe_activations(group, "x")
    assert found == "8-bit int with static scales (strategy 'tensor')"


def test_a_cache_with_scales_in_no_file():
    written = compressed_tensors.write(PACKED, [], [], "tensor")
    assert compressed_tensors.describe_cache(written) is None
    written["kv_cache_scheme"] |= {"dynamic": True}
    assert compressed_tensors.describe_cache(written) == "8-bit float with dynamic scales"
    assert not compressed_tensors.has_cache_scales(written)
    assert compressed_tensors.describe_cache(written | {"quant_method": "fp8"}) is None
    assert compressed_tensors.describe_cache({"quant_method": "awq"}) is None
