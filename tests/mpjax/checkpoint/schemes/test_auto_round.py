"""AutoRound's four packings, whose zero points differ by one."""

from __future__ import annotations

import numpy as np
import pytest

from mpjax.checkpoint.schemes import auto_round, registry
from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.checkpoint.schemes.pack_quantized import PackQuantizedScheme
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq
from tests.mpjax.checkpoint.write_checkpoint import compressed_integers

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
CHANNELS, OUTPUTS = 64, 32


def codes(rng):
    """Codes, scales, zeros from 1 on, and the weight [K, N]."""
    found = rng.integers(0, 16, (CHANNELS, OUTPUTS), np.uint8)
    scales = rng.uniform(0.01, 0.1, (2, OUTPUTS)).astype(np.float16)
    zeros = rng.integers(1, 16, (2, OUTPUTS), np.uint8)
    group = np.arange(CHANNELS) // 32
    weight = (found.astype(np.float32) - zeros[group]) * scales[group].astype(np.float32)
    return (found, scales, zeros), weight


@pytest.mark.parametrize(
    ("packing", "version"),
    [("auto_round:auto_gptq", 1), ("auto_round", 2), ("auto_round:gptqmodel", 2), (None, 2)],
)
def test_packed_as_gptq(packing, version, rng):
    module, weight = codes(rng)
    written = CONFIG if packing is None else CONFIG | {"packing_format": packing}
    scheme = registry.read(written)
    assert type(scheme) is GPTQScheme
    tensors = pack_gptq(*module, np.arange(CHANNELS) // 32, 4, version)
    np.testing.assert_array_equal(scheme.dequantize(tensors, "a"), weight)
    other = pack_gptq(*module, np.arange(CHANNELS) // 32, 4, 3 - version)
    assert (np.asarray(scheme.dequantize(other, "a")) != weight).any()  # off by one


def test_packed_as_awq(rng):
    module, weight = codes(rng)
    scheme = registry.read(CONFIG | {"packing_format": "auto_round:auto_awq"})
    assert scheme == AWQScheme(32, zero_point=True)
    np.testing.assert_array_equal(scheme.dequantize(pack_awq(*module), "a"), weight)
    symmetric = CONFIG | {"packing_format": "auto_round:auto_awq", "sym": True}
    assert registry.read(symmetric) == AWQScheme(32, zero_point=False)


def test_packed_as_compressed_tensors(rng):
    """Zero points as they are, eight of the output channels in each word."""
    (found, scales, zeros), weight = codes(rng)
    written = compressed_integers(symmetric=False) | {"quant_method": "auto-round", "sym": False}
    scheme = registry.read(written | {"packing_format": "auto_round:llm_compressor"})
    assert type(scheme) is PackQuantizedScheme
    tensors = {
        "weight_packed": nibbles(found.T),
        "weight_zero_point": nibbles(zeros).T,
        "weight_scale": scales.T,
        "weight_shape": np.array([OUTPUTS, CHANNELS]),
    }
    np.testing.assert_array_equal(scheme.dequantize(tensors, "a"), weight)
    other = tensors | {"weight_zero_point": nibbles(zeros - 1).T}
    assert (np.asarray(scheme.dequantize(other, "a")) != weight).any()  # off by one


def nibbles(fields):
    """Words int32 [rows, columns / 8] of 4-bit fields [rows, columns], the lowest bits first."""
    eights = fields.reshape(len(fields), -1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(eights << (4 * np.arange(8, dtype=np.uint32)), -1).view(np.int32)


def test_modules_with_settings_of_their_own():
    extra = {
        "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64, "act_bits": 16},
        "lm_head": {"bits": 16},
    }
    scheme = registry.read(CONFIG | {"extra_config": extra})
    assert scheme.for_module("model.layers.0.mlp.down_proj").bits == 8
    assert scheme.for_module("model.layers.0.mlp.down_proj").group_size == 64
    assert scheme.for_module("model.layers.10.mlp.down_proj").bits == 4
    assert scheme.for_module("lm_head") is None


def test_other_methods_are_left_alone():
    assert auto_round.translate({"quant_method": "awq"}) == {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packing_format": "auto_round:exllama"}, "packing_format is 'auto_round:exllama': exp"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp': expected 'int'"),
        ({"extra_config": [1]}, r"extra_config is \[1\]: expected an object"),
        ({"extra_config": {"a": 4}}, "extra_config, 'a' is 4: expected an object"),
        ({"bits": 3}, "bits is 3"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(CheckpointError, match=said):
        registry.read(CONFIG | change)
