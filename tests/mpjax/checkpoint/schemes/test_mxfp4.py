from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.schemes.mxfp4 import MXFP4Scheme
from mpjax.kernels import PlainCodes, WeightFormat, pack, unpack

SCHEME = MXFP4Scheme()
CHANNELS, OUTPUTS = 96, 5


@pytest.fixture
def tensors(rng):
    return {
        "blocks": rng.integers(0, 256, (OUTPUTS, 3, 16)).astype(np.uint8),
        "scales": rng.integers(1, 255, (OUTPUTS, 3)).astype(np.uint8),
    }


def test_the_low_bits_are_the_even_channel(tensors):
    blocks, scales = tensors.values()
    codes = np.stack([blocks & 15, blocks >> 4], -1).astype(np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = values.reshape(OUTPUTS, 3, 32) * 2.0 ** (scales.astype(float) - 127)[..., None]
    plain = SCHEME.decode(tensors, "module", (CHANNELS, OUTPUTS))
    assert plain.format == SCHEME.format("module", CHANNELS) == WeightFormat("float4", 32)
    np.testing.assert_array_equal(plain.codes, codes.reshape(OUTPUTS, CHANNELS).T)
    with np.errstate(over="ignore"):
        wide = expected.reshape(OUTPUTS, CHANNELS).T.astype(np.float32)
    normal = (np.abs(wide) >= np.finfo(np.float32).tiny) | (wide == 0)
    np.testing.assert_array_equal(np.asarray(plain.dequantize())[normal], wide[normal])


def test_writing_undoes_reading(tensors):
    tensors["scales"] = np.arange(15, dtype=np.uint8).reshape(5, 3)  # subnormal ones among them
    tensors["scales"][4] = [126, 127, 254]
    plain = SCHEME.decode(tensors, "module", (CHANNELS, OUTPUTS))
    written = SCHEME.encode(unpack(pack(plain)), "module")
    assert written.keys() == tensors.keys()
    for suffix, tensor in tensors.items():
        assert written[suffix].dtype == tensor.dtype
        np.testing.assert_array_equal(written[suffix], tensor)


def test_only_codes_of_four_bits_are_written(tensors):
    plain = SCHEME.decode(tensors, "module", (CHANNELS, OUTPUTS))
    scheme = MXFP4Scheme.of_layout("mxfp4", {"a": plain})
    assert scheme.quantization_config(["lm_head"])["modules_to_not_convert"] == ["lm_head"]
    integers = PlainCodes(WeightFormat("uint4", 32), plain.codes, plain.scales, plain.codes[:3])
    with pytest.raises(ValueError, match="format 'mxfp4' holds float4, and b is W4g32"):
        MXFP4Scheme.of_layout("mxfp4", {"a": plain, "b": integers})


def test_all_scales_are_powers_of_two_but_one_that_is_none(tensors):
    scales = np.arange(256, dtype=np.uint8)[:, None]
    blocks = np.zeros((256, 1, 16), np.uint8)
    found = SCHEME.decode({"blocks": blocks, "scales": scales}, "module").scales[0]
    found = np.asarray(found).astype(np.float64)
    np.testing.assert_array_equal(found[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(found[255])


def test_what_config_json_and_tensors_say():
    assert MXFP4Scheme.matches({"quant_method": "mxfp4"})
    assert MXFP4Scheme.from_config({"quant_method": "mxfp4"}) == SCHEME
    with pytest.raises(CheckpointError, match="quant_method is 'awq': expected 'mxfp4'"):
        MXFP4Scheme.from_config({"quant_method": "awq"})
    u8 = jax.ShapeDtypeStruct((4, 2, 16), np.uint8)
    assert MXFP4Scheme.holds({"blocks": u8})
    assert not MXFP4Scheme.holds({"weight": u8})


def test_shapes_that_are_wrong(tensors):
    assert SCHEME.check(tensors, "module") == (CHANNELS, OUTPUTS)
    with pytest.raises(CheckpointError, match=r"module\.blocks is uint8 \[5, 3, 16\]: expected"):
        SCHEME.check(tensors, "module", (128, OUTPUTS))
    with pytest.raises(CheckpointError, match="module has no tensor scales"):
        SCHEME.check({"blocks": tensors["blocks"]}, "module")
    with pytest.raises(CheckpointError, match="module has 90 input channels by"):
        SCHEME.check(tensors, "module", (90, OUTPUTS))
