from __future__ import annotations

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.packers import pack_awq
from tests.mpjax.checkpoint.schemes.plain import random_plain

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NAME = "model.layers.0.mlp.down_proj"


def random_module(rows=64, columns=24, group_size=32, seed=0, scale_dtype=np.float16):
    """Tensors of random bits: every 32-bit word is a valid vector."""
    rng = np.random.default_rng(seed)
    groups = rows // group_size

    def words(*shape):
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    return {
        "qweight": words(rows, columns // 8),
        "qzeros": words(groups, columns // 8),
        "scales": rng.uniform(0.01, 0.1, (groups, columns)).astype(scale_dtype),
    }


def field(words, row, column):
    """Nibble i of word c holds column 8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]."""
    nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(column % 8)
    return (int(words[row, column // 8]) % 2**32) // 16**nibble % 16


def dequantized(tensors, group_size):
    rows, columns = tensors["qweight"].shape[0], tensors["scales"].shape[1]
    weight = np.empty((rows, columns), np.float64)
    for k in range(rows):
        for n in range(columns):
            g = k // group_size
            difference = field(tensors["qweight"], k, n) - field(tensors["qzeros"], g, n)
            weight[k, n] = difference * float(tensors["scales"][g, n])
    return weight


def config(**changes):
    return AWQScheme.from_config({**CONFIG, **changes})


@pytest.mark.parametrize("scale_dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_decode_equals_the_format_description(scale_dtype):
    tensors = random_module(scale_dtype=scale_dtype)
    linear = config().decode(tensors, NAME)
    expected = [[field(tensors["qweight"], k, n) for n in range(24)] for k in range(64)]
    np.testing.assert_array_equal(linear.codes, np.array(expected))
    expected = [[field(tensors["qzeros"], g, n) for n in range(24)] for g in range(2)]
    np.testing.assert_array_equal(linear.zeros, np.array(expected))
    np.testing.assert_array_equal(linear.scales, tensors["scales"])
    assert linear.codes.dtype == np.uint8
    assert linear.zeros.dtype == np.uint16
    assert linear.scales.dtype == scale_dtype
    assert (linear.shape, linear.format) == ((64, 24), WeightFormat("uint4", 32))
    assert linear.permutation is None


def test_dequantized_weight_equals_the_format_description():
    tensors = random_module()
    linear = config().decode(tensors, NAME)
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 32))


def test_one_word_by_hand():
    # 0x76543210: nibble i is i, so the columns are 0, 4, 1, 5, 2, 6, 3, 7.
    tensors = {
        "qweight": np.array([[0x76543210]], np.int32),
        "qzeros": np.array([[-1]], np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    linear = config(group_size=-1).decode(tensors, NAME)
    np.testing.assert_array_equal(linear.codes, [[0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(linear.zeros, [[15] * 8])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(32, 8), (96, 40)]))
def test_decode_inverts_the_packer(seed, shape):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape)
    zeros = rng.integers(0, 16, (shape[0] // 32, shape[1]))
    linear = config().decode(pack_awq(codes, np.ones(zeros.shape, np.float16), zeros), NAME)
    np.testing.assert_array_equal(linear.codes, codes)
    np.testing.assert_array_equal(linear.zeros, zeros)


def test_whole_k_group():
    tensors = random_module(group_size=64)
    linear = config(group_size=-1).decode(tensors, NAME)
    assert linear.format == WeightFormat("uint4")
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 64))


def test_decode_inside_jit():
    tensors = random_module()
    jitted = jax.jit(lambda arrays: config().decode(arrays, NAME))(tensors)
    eager = config().decode(tensors, NAME)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)


def test_config_of_autoawq_and_gptqmodel():
    parsed = AWQScheme.from_config({"quant_method": "awq", "w_bit": 4, "q_group_size": 128})
    assert parsed == AWQScheme(128, True)
    parsed = config(version=None, format="gemm", checkpoint_format="gemm", group_size=-1)
    assert parsed == AWQScheme(None, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq': expected 'awq'"),
        ({"bits": 8}, "bits is 8: only 4 bits are supported"),
        ({"bits": "4"}, "bits is '4': expected an integer"),
        ({"version": "GEMV"}, "layout 'gemv'.*look for a 'gemm' checkpoint"),
        ({"version": "marlin"}, "layout 'marlin'"),
        ({"version": "llm-awq"}, "layout 'llm-awq'"),
        ({"backend": "llm-awq"}, "layout 'llm-awq'"),
        ({"checkpoint_format": "gemv"}, "layout 'gemv'"),
        ({"group_size": 0}, "group_size is 0: expected a positive number, or -1"),
        ({"group_size": True}, "group_size is True: expected an integer"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config(**changes)


def test_config_without_group_size():
    with pytest.raises(CheckpointError, match="has no group_size"):
        AWQScheme.from_config({"quant_method": "awq", "bits": 4})


def test_matches_only_awq_shapes():
    tensors = random_module()
    assert AWQScheme.holds(tensors)
    assert not AWQScheme.holds({"weight": tensors["scales"]})
    assert not AWQScheme.holds({**tensors, "qweight": np.zeros((8, 24), np.int32)})


@pytest.mark.parametrize(
    ("suffix", "array", "message"),
    [
        (
            "qzeros",
            np.zeros((3, 3), np.int32),
            r"down_proj\.qzeros is int32 \[3, 3\]: expected int32 \[2, 3\]",
        ),
        (
            "qzeros",
            np.zeros((2, 3), np.int64),
            r"qzeros is int64 \[2, 3\]: expected int32 \[2, 3\]",
        ),
        ("qweight", np.zeros((64, 3), np.uint8), r"qweight is uint8 \[64, 3\]: expected int32"),
        (
            "scales",
            np.zeros((8, 24), np.float16),
            r"scales is float16 \[8, 24\]: expected float16 or bfloat16 or float32 \[2, 24\]",
        ),
        ("scales", np.zeros((2, 24), np.int8), r"scales is int8 \[2, 24\]"),
        ("qweight", np.zeros((60, 3), np.int32), "60 input channels: expected a multiple of.* 32"),
        ("qweight", np.zeros((64, 4), np.int32), "neither AWQ gemm .* nor GPTQ"),
        ("qweight", np.zeros((8, 24), np.int32), "says quant_method 'awq', but.* packed as GPTQ"),
    ],
)
def test_tensor_errors(suffix, array, message):
    with pytest.raises(CheckpointError, match=message):
        config().decode({**random_module(), suffix: array}, NAME)


def test_shape_that_the_model_expects():
    assert config().check(random_module(), NAME, (64, 24)) == (64, 24)
    with pytest.raises(CheckpointError, match=r"64 input and 24 output.*expects 128 and 24"):
        config().decode(random_module(), NAME, (128, 24))


@pytest.mark.parametrize("suffix", AWQScheme.suffixes)
def test_missing_tensor(suffix):
    tensors = random_module()
    del tensors[suffix]
    with pytest.raises(CheckpointError, match=f"{NAME} has no tensor {suffix}"):
        config().decode(tensors, NAME)


def test_without_zero_points():
    tensors = random_module()
    del tensors["qzeros"]
    with pytest.raises(CheckpointError, match="zero_point: false: AWQ's gemm layout always stores"):
        config(zero_point=False).decode(tensors, NAME)


def test_zero_points_that_contradict_the_config():
    tensors = random_module()
    with pytest.raises(
        CheckpointError, match=r"from 0 to 15, but .* \(zero_point: false\) all are 8"
    ):
        config(zero_point=False).decode(tensors, NAME)
    tensors["qzeros"] = np.full_like(tensors["qzeros"], np.uint32(0x88888888).view(np.int32))
    zeros = config(zero_point=False).decode(tensors, NAME).zeros
    np.testing.assert_array_equal(zeros, np.full(zeros.shape, 8))
    with pytest.raises(CheckpointError, match="zero_point is 'no': expected true or false"):
        config(zero_point="no")


def test_what_is_written_is_read():
    modules = {
        NAME: random_plain("uint4:g32", (64, 8)),
        "b": random_plain("uint4:g32:sym", (64, 8)),
    }
    scheme = AWQScheme.of_layout("awq", modules)
    written = scheme.quantization_config(["lm_head", "c"])
    assert written["modules_to_not_convert"] == ["lm_head", "c"]
    assert AWQScheme.from_config(written) == scheme == AWQScheme(32)
    with pytest.raises(ValueError, match=r"'awq' packs 8 output channels in a word, and .* has 12"):
        scheme.encode(random_plain("uint4:g32", (64, 12)), NAME)
    plain = modules[NAME]
    plain = dataclasses.replace(plain, zeros=plain.zeros.at[0, 0].set(16))
    with pytest.raises(
        ValueError, match=r"'awq' holds zero points from 0 to 15, and .* to 16: expor"
    ):
        scheme.encode(plain, NAME)
