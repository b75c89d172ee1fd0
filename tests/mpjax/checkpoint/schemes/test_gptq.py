"""GPTQ's zero points, the order of its channels, and its settings; see test_schemes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes import gptq, registry
from mpjax.checkpoint.schemes.gptq import GPTQReader
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.packers import pack_gptq
from tests.mpjax.checkpoint.schemes.modules import NAME
from tests.mpjax.checkpoint.schemes.modules import gptq as module
from tests.mpjax.checkpoint.write_checkpoint import AWQ, GPTQ

SHAPE = 64, 24


def reader(**changes):
    return registry.read(GPTQ | changes).reader(NAME)


def test_zero_points_of_v1_by_hand():
    # Written zero points, lowest field first: 0, 3, 0, 15, 1, 8, 0, 0. In one subtraction of
    # 0x11111111 the zeros borrow, and the last borrow leaves the word.
    written = [0, 3, 0, 15, 1, 8, 0, 0]
    word = sum(value << 4 * i for i, value in enumerate(written))
    stored = (word - 0x11111111) % 2**32
    assert [(stored >> 4 * i) % 16 for i in range(8)] == [15, 1, 15, 13, 0, 7, 15, 14]
    tensors = {
        "qweight": np.zeros((1, 8), np.int32),
        "qzeros": np.array([[stored]], np.uint32).view(np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    np.testing.assert_array_equal(reader(group_size=-1).decode(tensors, NAME).zeros, [written])


def test_a_word_of_awq_by_hand():
    # 0x76543210: nibble i is i, so the columns are 0, 4, 1, 5, 2, 6, 3, 7.
    tensors = {
        "qweight": np.array([[0x76543210]], np.int32),
        "qzeros": np.array([[-1]], np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    plain = registry.read(AWQ | {"group_size": -1}).reader(NAME).decode(tensors, NAME)
    np.testing.assert_array_equal(plain.codes, [[0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(plain.zeros, [[15] * 8])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_of_a_symmetric_weight_say_how_they_are_stored(bits, said, version, rng):
    """Where config.json names the wrong version, and says that all are the middle, or nothing."""
    middle = np.full((2, 24), 2 ** (bits - 1))
    codes, scales = np.zeros(SHAPE), np.ones((2, 24), np.float16)
    tensors = pack_gptq(codes, scales, middle, None, bits, version)
    for sym in (True, None):
        parsed = reader(bits=bits, checkpoint_format=said, sym=sym)
        np.testing.assert_array_equal(parsed.decode(tensors, NAME).zeros, middle)
    # Where the file says that they are not symmetric, they are what it says.
    beside = {("gptq", 2): 1, ("gptq_v2", 1): -1}.get((said, version), 0)
    parsed = reader(bits=bits, checkpoint_format=said)
    np.testing.assert_array_equal(parsed.decode(tensors, NAME).zeros, middle + beside)
    for zeros in (np.where(np.arange(24) == 3, 5, middle), middle + 2, 0 * middle):
        tensors = pack_gptq(codes, scales, zeros, None, bits, 1 if said == "gptq" else 2)
        message = (
            f"{NAME}.qzeros has zero points from {zeros.min()} to {zeros.max()}, but by "
            rf"config.json \(sym: true\) all are {2 ** (bits - 1)}"
        )
        with pytest.raises(CheckpointError, match=message):
            reader(bits=bits, checkpoint_format=said, sym=True).decode(tensors, NAME)
        open_to_all = reader(bits=bits, checkpoint_format=said, sym=None)
        np.testing.assert_array_equal(open_to_all.decode(tensors, NAME).zeros, zeros)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.booleans())
def test_decode_inverts_the_packer(seed, bits, version, act_order):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (64, 16))
    zeros = rng.integers(0, 2**bits, (2, 16))
    zeros[rng.random(zeros.shape) < 0.4] = 0
    scales = rng.uniform(0.5, 1, (2, 16)).astype(np.float16)
    g_idx = np.arange(64) // 32
    g_idx = rng.permutation(g_idx) if act_order else g_idx
    tensors = pack_gptq(codes, scales, zeros, g_idx, bits, version)
    plain = reader(bits=bits, checkpoint_format=["gptq", "gptq_v2"][version - 1]).decode(
        tensors, NAME
    )
    order = np.arange(64) if plain.permutation is None else np.asarray(plain.permutation)
    np.testing.assert_array_equal(plain.codes, codes[order])
    np.testing.assert_array_equal(plain.zeros, zeros)
    expected = (codes - zeros[g_idx]) * scales[g_idx].astype(np.float64)
    np.testing.assert_array_equal(plain.dequantize(), expected)


def test_permuted_rows_lie_in_groups_and_keep_their_order():
    g_idx = np.array([1, 0, 1, 0, 2, 2], np.int32)
    np.testing.assert_array_equal(gptq.permutation_of(g_idx, 2, NAME), [1, 3, 0, 2, 4, 5])
    assert gptq.permutation_of(np.arange(6) // 2, 2, NAME) is None


def test_g_idx_counts_and_may_be_absent_only_without_act_order(rng):
    tensors, weight = module(rng, SHAPE, order=True)
    for said in (True, False):
        found = reader(desc_act=said).decode(tensors, NAME)
        np.testing.assert_array_equal(found.dequantize(), weight)
    tensors, _ = module(rng, SHAPE)
    expected = reader().decode(tensors, NAME)
    del tensors["g_idx"]
    for parsed in (reader(), reader(desc_act=True, static_groups=True)):
        jax.tree.map(np.testing.assert_array_equal, parsed.decode(tensors, NAME), expected)
    with pytest.raises(CheckpointError, match=f"{NAME} has no tensor g_idx"):
        reader(desc_act=True).decode(tensors, NAME)


def test_g_idx_must_be_known(rng):
    tensors, _ = module(rng, SHAPE, order=True)
    with pytest.raises(ValueError, match="g_idx is an argument of a jitted function"):
        jax.jit(lambda arrays: reader().decode(arrays, NAME))(tensors)


def test_settings_that_config_json_may_have():
    assert reader(sym=None) == GPTQReader(4, 32)
    assert reader(checkpoint_format=None).checkpoint_format == "gptq"
    assert reader(format="gptq_v2").checkpoint_format == "gptq_v2"
    found = reader(
        format="gptq_v2", checkpoint_format="gptq_v2", pack_dtype="int32", bits=8, group_size=-1
    )
    assert found == GPTQReader(8, None, "gptq_v2", symmetric=False)
    assert registry.read({"method": "gptq", "bits": 4, "group_size": 32}).method == "gptq"
    for meta, says, expected in (
        ({"static_groups": True}, {}, True),
        ({"static_groups": True}, {"static_groups": None}, True),
        ({"static_groups": True}, {"static_groups": False}, False),
        ({}, {"static_groups": True}, True),
        ({}, {}, False),
    ):
        assert reader(meta=meta, **says).static_groups == expected
