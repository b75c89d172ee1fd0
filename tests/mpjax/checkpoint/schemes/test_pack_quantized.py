from __future__ import annotations

import copy
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint.schemes.pack_quantized import Group, PackQuantizedScheme
from mpjax.checkpoint.schemes.writing import Integers
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack
from tests.mpjax.checkpoint.schemes.plain import random_plain
from tests.mpjax.checkpoint.write_checkpoint import CACHE, compressed_integers

NAME = "model.layers.0.mlp.down_proj"
OTHER = "model.layers.0.mlp.up_proj"
parse = PackQuantizedScheme.from_config


def scheme(**weights):
    return parse(compressed_integers(**weights))


def random_module(scheme, channels=96, outputs=13, seed=0, scale_dtype=np.float16):
    """Tensors of random bits, but that the last words of a row may be cut."""
    rng = np.random.default_rng(seed)
    (bits, size, symmetric), order = scheme.groups[0][1:]
    groups = 1 if size is None else channels // size

    def words(*shape):
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    tensors = {
        "weight_packed": words(outputs, -(-channels * bits // 32)),
        "weight_scale": rng.uniform(0.01, 0.1, (outputs, groups)).astype(scale_dtype),
        "weight_shape": np.array([outputs, channels]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(-(-outputs * bits // 32), groups)
    if order:
        tensors["weight_g_idx"] = rng.permutation(np.arange(channels) // size).astype(np.int32)
    return tensors


def dequantized(tensors, bits):
    """Field i of a row lies at bit b · i, lowest bits first, and is the code plus 2**(b − 1)."""
    outputs, channels = tensors["weight_shape"]
    groups = tensors["weight_scale"].shape[1]
    g_idx = tensors.get("weight_g_idx", np.arange(channels) // (channels // groups))

    def field(word_of, i):
        word, place = divmod(i * bits, 32)
        return (int(word_of(word)) % 2**32) // 2**place % 2**bits - 2 ** (bits - 1)

    weight = np.empty((channels, outputs), np.float32)
    for n in range(outputs):
        for k in range(channels):
            g, zero = g_idx[k], 0
            if "weight_zero_point" in tensors:
                zero = field(lambda word, g=g: tensors["weight_zero_point"][word, g], n)
            code = field(lambda word, n=n: tensors["weight_packed"][n, word], k)
            weight[k, n] = np.float32(code - zero) * np.float32(tensors["weight_scale"][n, g])
    return weight


@pytest.mark.parametrize("scale_dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("weights", "channels"),
    [
        ({}, 96),
        ({"num_bits": 8}, 64),
        ({"symmetric": False}, 96),
        ({"symmetric": False, "num_bits": 8, "strategy": "channel", "group_size": None}, 69),
        ({"actorder": "group"}, 96),
        ({"actorder": "group", "symmetric": False, "num_bits": 8}, 96),
        ({"actorder": "static"}, 64),
    ],
)
def test_the_packed_weight_equals_the_format_description(weights, channels, scale_dtype):
    config = scheme(**weights)
    tensors = random_module(config, channels, scale_dtype=scale_dtype)
    plain = config.decode(tensors, NAME, (channels, 13))
    expected = dequantized(tensors, config.groups[0].integers.bits)
    np.testing.assert_array_equal(plain.dequantize(), expected)
    np.testing.assert_array_equal(pack(plain).dequantize(), expected)
    assert (plain.permutation is not None) == (weights.get("actorder") == "group")


def test_decode_inside_jit():
    config = scheme(symmetric=False)
    tensors = random_module(config)
    jitted = jax.jit(lambda arrays: config.decode(arrays, NAME))(tensors)
    jax.tree.map(np.testing.assert_array_equal, jitted, config.decode(tensors, NAME))


def test_configurations():
    config = scheme()
    assert config == PackQuantizedScheme((Group(("Linear",), Integers(4, 32, True)),), ("lm_head",))
    assert config.weights == WeightFormat("uint4", 32)
    assert config.extra_bytes({"weight_packed": 0}, (64, 8)) == 0
    assert config.extra_bytes({"weight_g_idx": 0}, (64, 8)) == 4 * 64
    for order, has_order in [("weight", False), ("group", True), ("dynamic", True), (True, True)]:
        assert scheme(actorder=order).groups[0].has_order is has_order
    assert scheme(symmetric=None).groups[0].integers.symmetric  # what files leave out
    assert parse(compressed_integers() | {"kv_cache_scheme": CACHE}).has_cache_scales
    one_group = scheme(strategy="group", group_size=-1)
    assert one_group.groups == scheme(strategy="channel", group_size=None).groups


def test_groups_of_several_kinds():
    written = compressed_integers()
    group = written["config_groups"]["group_0"]
    written["config_groups"] = {
        "names": group | {"targets": [NAME], "weights": group["weights"] | {"num_bits": 8}},
        "all": group,
        "pattern": group
        | {"targets": ["re:.*mlp"], "weights": group["weights"] | {"group_size": 64}},
    }
    written["ignore"] = ["lm_head", "re:.*o_proj$"]
    config = parse(written)
    assert config.format(NAME, 128) == WeightFormat("uint8", 32)
    assert config.format(OTHER, 128) == WeightFormat("uint4", 64)
    assert config.format("model.layers.0.self_attn.q_proj", 128) == config.weights
    with pytest.raises(
        CheckpointError, match="o_proj has packed tensors, but by `ignore` in config"
    ):
        config.format("model.layers.0.self_attn.o_proj", 128)
    del written["config_groups"]["all"]
    with pytest.raises(
        CheckpointError, match="q_proj has packed tensors, but no group's targets in"
    ):
        parse(written).format("model.layers.0.self_attn.q_proj", 128)


def test_activations_are_left_to_somebody_to_choose():
    written = copy.deepcopy(compressed_integers())
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    written["config_groups"]["group_0"]["input_activations"] = inputs
    config = parse(written)
    assert config.unsupported_activations == "8-bit float with dynamic scales (strategy 'token')"
    assert config.choices == (scheme(),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "dense", "format is 'dense': expected 'pack-quantized'"),
        (["ignore"], "lm_head", "ignore is 'lm_head': expected a list of texts"),
        (["ignore"], ["re:a("], "ignore 're:a(' is not a regular expression"),
        (["transform_config"], {"R1": {}}, "there is a transform_config"),
        (["config_groups"], [], "config_groups is []: expected a map of groups"),
        (["config_groups", "group_0"], 3, "group 'group_0' is 3: expected an object"),
        (["config_groups", "group_0", "targets"], 3, "targets is 3: expected a list of texts"),
        (["config_groups", "group_0", "weights"], None, "weights is None: expected an object"),
        (["config_groups", "group_0", "weights", "num_bits"], 3, "num_bits is 3: expected 4 or 8"),
        (
            ["config_groups", "group_0", "weights", "type"],
            "float",
            "type is 'float': expected 'int'",
        ),
        (
            ["config_groups", "group_0", "weights", "strategy"],
            "tensor",
            "strategy is 'tensor': exp",
        ),
        (
            ["config_groups", "group_0", "weights", "group_size"],
            0,
            "group_size is 0: expected a pos",
        ),
        (
            ["config_groups", "group_0", "weights", "group_size"],
            "32",
            "group_size is '32': expected",
        ),
        (
            ["config_groups", "group_0", "weights", "symmetric"],
            "yes",
            "symmetric is 'yes': expected",
        ),
        (
            ["config_groups", "group_0", "weights", "actorder"],
            "x",
            "actorder is 'x': expected null",
        ),
        (
            ["config_groups", "group_0", "weights", "actorder"],
            [1],
            "actorder is [1]: expected null",
        ),
        (
            ["config_groups", "group_0", "weights", "dynamic"],
            True,
            "dynamic is True: expected False",
        ),
    ],
)
def test_config_errors(path, value, message):
    written = copy.deepcopy(compressed_integers())
    node = written
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(written)


@pytest.mark.parametrize(
    ("suffix", "array", "message"),
    [
        (
            "weight_packed",
            np.zeros((13, 12), np.uint8),
            "weight_packed is uint8 [13, 12]: expected int",
        ),
        ("weight_packed", np.zeros(13, np.int32), "no tensor weight_packed that is a matrix"),
        (
            "weight_packed",
            np.zeros((13, 13), np.int32),
            "has 104 input channels: expected a multiple",
        ),
        ("weight_scale", np.zeros((3, 13), np.float16), "[13, 3], by num_bits 4 and group_size 32"),
        ("weight_scale", np.zeros((13, 3), np.int8), "weight_scale is int8 [13, 3]"),
        (
            "weight_shape",
            np.array([13, 95]),
            "weight_shape is [13, 95]: expected [13, 96], as the o",
        ),
        ("weight_shape", np.array([13.0, 96.0]), "weight_shape is float64 [2]: expected int64"),
        ("weight_zero_point", np.zeros((13, 3), np.int32), "int32 [13, 3]: expected int32 [2, 3]"),
        (
            "weight_g_idx",
            np.zeros(96, np.int32),
            "tensor weight_g_idx, which by actorder in config",
        ),
    ],
)
def test_tensor_errors(suffix, array, message):
    config = scheme(symmetric=False)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        config.decode({**random_module(config), suffix: array}, NAME)


def test_other_contradictions():
    symmetric, config = scheme(), scheme(symmetric=False)
    with pytest.raises(
        CheckpointError, match=r"weight_zero_point, which by symmetric in config.json"
    ):
        symmetric.check(random_module(config), NAME)
    with pytest.raises(
        CheckpointError, match=r"no tensor weight_zero_point: expected int32 \[2, 3"
    ):
        config.check(random_module(symmetric), NAME)
    with pytest.raises(CheckpointError, match=r"no tensor weight_g_idx: expected int32 \[96\]"):
        scheme(actorder="group").check(random_module(symmetric), NAME)
    with pytest.raises(CheckpointError, match=r"96 input and 13 output.* expects 64 and 13"):
        symmetric.check(random_module(symmetric), NAME, (64, 13))
    ordered = scheme(actorder="group")
    tensors = random_module(ordered) | {"weight_g_idx": np.zeros(96, np.int32)}
    with pytest.raises(
        CheckpointError, match=r"weight_g_idx puts 96 channels in group 0: expected"
    ):
        ordered.decode(tensors, NAME)


def test_what_is_written_is_read(rng):
    modules = {
        "a": random_plain("uint4:g32:sym", (64, 8)),
        "b": random_plain("uint4:g32:sym", (64, 8)),
        "c": random_plain("uint8", (64, 8)),
        "d": random_plain("uint8", (64, 8)),
        "e": random_plain("uint8", (64, 8)),
        "f": random_plain("uint4:g64", (64, 8)),
    }
    config = PackQuantizedScheme.of_layout("pack-quantized", modules)
    assert [group.targets for group in config.groups] == [("Linear",), ("a", "b"), ("f",)]
    found = parse(config.quantization_config(["lm_head"], "attn_head"))
    assert found.groups == config.groups
    assert (found.ignore, found.has_cache_scales) == (("lm_head",), True)
    for name, plain in modules.items():
        again = found.decode(found.encode(plain, name), name)
        np.testing.assert_array_equal(again.dequantize(), plain.dequantize())
    with pytest.raises(
        ValueError, match="'pack-quantized' holds zero points from 8 to 8, and a has"
    ):
        config.encode(random_plain("uint4:g32", (64, 8)), "a")
