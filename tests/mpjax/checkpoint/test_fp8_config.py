from __future__ import annotations

import copy
import re

import pytest

from mpjax.checkpoint.fp8_config import FP8Config
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.write_checkpoint import CACHE, FP8, compressed_fp8

parse = FP8Config.from_config
BLOCK = (128, 128)


def test_the_fine_grained_format():
    config = parse(FP8)
    assert config == FP8Config("fp8", BLOCK, "float8")
    assert config.scale_name == "weight_scale_inv"
    assert config.format == WeightFormat.parse("float8:g128/float8")
    # What older files leave out.
    assert parse({"quant_method": "fp8", "weight_block_size": [128, 128]}) == config
    assert parse(FP8 | {"weight_block_size": [64, 128]}).block == (64, 128)


@pytest.mark.parametrize(
    ("strategy", "activations", "block", "format"),
    [
        ("channel", "token", (1, None), "float8:gK/float8"),
        ("tensor", "token", (None, None), "float8:gK/float8"),
        ("block", "group", BLOCK, "float8:g128/float8"),
        ("channel", None, (1, None), "float8:gK"),
        ("tensor", None, (None, None), "float8:gK"),
        ("block", None, BLOCK, "float8:g128"),
    ],
)
def test_compressed_tensors(strategy, activations, block, format):
    config = parse(compressed_fp8(strategy, activations))
    assert config.block == block
    assert config.format == WeightFormat.parse(format)
    assert config.unsupported is None
    assert config.scale_name == "weight_scale"


def test_a_scheme_of_the_cache_says_that_there_are_scales():
    written = compressed_fp8("channel", "token")
    assert not parse(written).has_cache_scales
    for strategy in ("tensor", "attn_head"):
        written["kv_cache_scheme"] = CACHE | {"strategy": strategy}
        assert parse(written).has_cache_scales


def test_groups_of_one_scheme_are_one():
    written = compressed_fp8("channel", "token")
    [group] = written["config_groups"].values()
    written["config_groups"] = {"FP8_DYNAMIC": group, "attention": group}
    assert parse(written) == parse(compressed_fp8("channel", "token"))
    [other] = compressed_fp8("tensor", "token")["config_groups"].values()
    written["config_groups"]["attention"] = other
    with pytest.raises(CheckpointError, match="config_groups FP8_DYNAMIC, attention differ"):
        parse(written)


def integers(written):
    written["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    return written


@pytest.mark.parametrize(
    ("written", "what"),
    [
        (FP8 | {"activation_scheme": "static"}, "FP8 with static scales"),
        (compressed_fp8("tensor", "tensor", False), "8-bit float with static scales"),
        (compressed_fp8("channel", "tensor"), "dynamic scales (strategy 'tensor')"),
        (compressed_fp8("block", "token"), "dynamic scales (strategy 'token')"),
        (compressed_fp8("channel", "group"), "dynamic scales (groups of 128)"),
        (integers(compressed_fp8("channel", "token")), "8-bit int with dynamic scales"),
    ],
)
def test_other_activations_are_left_to_somebody_to_choose(written, what):
    config = parse(written)
    assert what in (config.unsupported or "")
    assert config.activations is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq': expected 'fp8' or 'compressed-tensors'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2': expected 'e4m3'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0': expected 'float'"),
        ({"activation_scheme": 1}, "activation_scheme is 1: expected 'dynamic' or 'static'"),
        ({"weight_block_size": [128, 64]}, "weight_block_size is [128, 64]: expected [128, 128]"),
        ({"weight_block_size": None}, "weight_block_size is None: expected [128, 128]"),
        ({"weight_block_size": [128]}, "weight_block_size is [128]: expected"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]: expected"),
        ({"weight_block_size": [True, 128]}, "weight_block_size is [True, 128]: expected"),
    ],
)
def test_fine_grained_errors(changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(FP8 | changes)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "pack-quantized", "format is 'pack-quantized': expected 'float-quantized'"),
        (["format"], None, "format is None: expected 'float-quantized' or 'naive-quantized'"),
        (["kv_cache_scheme"], [8], "kv_cache_scheme is [8]: expected an object"),
        (["kv_cache_scheme"], CACHE | {"type": "int"}, "kv_cache_scheme: type is 'int': expected"),
        (["kv_cache_scheme"], CACHE | {"dynamic": True}, "kv_cache_scheme: dynamic is True"),
        (["kv_cache_scheme"], CACHE | {"strategy": "channel"}, "strategy is 'channel': expected"),
        (["transform_config"], {"config_groups": {"R1": {}}}, "there is a transform_config"),
        (["config_groups"], {}, "config_groups is {}: expected a map of groups"),
        (["config_groups", "group_0"], [], "group 'group_0' is []: expected an object"),
        (["config_groups", "group_0", "format"], "dense", "group 'group_0': format is 'dense'"),
        (["config_groups", "group_0", "weights"], None, "weights is None: expected an object"),
        (
            ["config_groups", "group_0", "input_activations"],
            "dynamic",
            "group 'group_0', input_activations is 'dynamic': expected an object",
        ),
        (["config_groups", "group_0", "output_activations"], {"num_bits": 8}, "output_activations"),
        (["config_groups", "group_0", "weights", "type"], "int", "type is 'int': expected 'float'"),
        (["config_groups", "group_0", "weights", "num_bits"], 4, "num_bits is 4: expected 8"),
        (["config_groups", "group_0", "weights", "symmetric"], False, "symmetric is False"),
        (["config_groups", "group_0", "weights", "strategy"], "group", "strategy is 'group'"),
        (["config_groups", "group_0", "weights", "block_structure"], [64, 64], "is [64, 64]: exp"),
    ],
)
def test_compressed_tensors_errors(path, value, message):
    written = copy.deepcopy(compressed_fp8("block", "group"))
    node = written
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(written)
