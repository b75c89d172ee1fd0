"""HQQ along the input channels, against a packer written from its description."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.hqq import HQQScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import pack
from tests.mpjax.checkpoint.write_checkpoint import (
    HQQ,
    LLAMA,
    hqq,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

NAME = "model.layers.0.mlp.down_proj"


def module(rng, shape=(128, 16), group=32, bits=4, dtype=np.float16):
    """The tensors of a module, and its weight [K, N] with scales and minima in float16."""
    channels, outputs = shape
    codes = rng.integers(0, 2**bits, (outputs * channels // group, group), np.uint8)
    zero = rng.uniform(0, 2**bits, (len(codes), 1)).astype(dtype)
    scale = rng.uniform(0.01, 0.1, (len(codes), 1)).astype(dtype)
    half = len(codes) // 2
    packed = codes if bits == 8 else codes[:half] << 4 | codes[half:]
    settings = {"nbits": np.array([bits]), "shape": np.array(shape[::-1])}
    tensors = {"W_q": packed, "scale": scale, "zero": zero, **settings}
    minima = (-zero.astype(np.float32) * scale.astype(np.float32)).astype(np.float16)
    wide = codes * scale.astype(np.float16).astype(np.float64) + minima
    exact = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
    assert (abs(wide - exact) <= 2.0**-11 * (codes + zero.astype(np.float64)) * scale).all()
    return tensors, wide.reshape(outputs, channels).T


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64), (4, 256)])
def test_every_weight(bits, group, dtype, rng):
    """With several groups of an output channel; those of 256 become two each."""
    tensors, expected = module(rng, (512, 16), group, bits, dtype)
    scheme = registry.read(hqq(nbits=bits, group_size=group))
    assert registry.of_module(tensors) is type(scheme) is HQQScheme
    assert scheme.check(tensors, NAME, (512, 16)) == (512, 16)
    plain = scheme.decode(tensors, NAME, (512, 16))
    assert plain.format == scheme.format(NAME, 512) == scheme.weights
    assert str(plain.format) == f"affine{bits}:g{min(group, 128)}"
    np.testing.assert_allclose(pack(plain).dequantize(), expected, rtol=3e-7, atol=1e-6)


def test_one_group_of_all_channels(rng):
    tensors, _ = module(rng, (256, 4), 256)
    scheme = registry.read(hqq(group_size=None))
    assert str(scheme.decode(tensors, NAME, (256, 4)).format) == "affine4:g128"


def test_settings_by_module(rng):
    usual = HQQ["quant_config"]
    eight = usual | {"weight_quant_params": usual["weight_quant_params"] | {"nbits": 8}}
    written = HQQ | {"quant_config": {"mlp.down_proj": eight, "mlp.up_proj": usual}}
    scheme = registry.read(written)
    tensors, _ = module(rng, bits=8)
    assert str(scheme.decode(tensors, NAME, (128, 16)).format) == "affine8:g32"
    assert str(scheme.format("model.layers.0.mlp.up_proj", 64)) == "affine4:g32"
    assert scheme.contents == "HQQ, codes kept as WM8"
    assert scheme.loss == "scales and minima of HQQ to float16"
    with pytest.raises(CheckpointError, match=r"a\.k_proj is an HQQ module, but quant_config in"):
        scheme.check(tensors, "a.k_proj", (128, 16))


def test_a_model_has_the_logits_of_its_weights(rng, tmp_path):
    quantized = dict(plain := random_tensors(LLAMA, rng))
    for name, shape in linear_shapes(LLAMA).items():
        tensors, weight = module(rng, shape)
        replace_module(quantized, name, tensors)
        plain[f"{name}.weight"] = weight.T.astype(np.float32)
    hf = LLAMA | {"quantization_config": HQQ}
    found = mpjax.load(write_checkpoint(tmp_path / "q", hf, quantized), dtype="float32")
    expected = mpjax.load(write_checkpoint(tmp_path / "p", LLAMA, plain), dtype="float32")
    assert found.precision == "WM4A32KV16"
    tokens = np.arange(8, dtype=np.int32)[None]
    want = np.asarray(expected.model(tokens))
    np.testing.assert_allclose(found.model(tokens), want, atol=1e-4 * abs(want).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W_q": np.zeros((3, 32), np.uint8)}, r"W_q is uint8 \[3, 32\]: expected uint8 \[32, 32"),
        ({"W_q": np.zeros((32, 32), np.int32)}, r"W_q is int32 \[32, 32\]"),
        ({"scale": np.zeros((64,), np.float16)}, r"scale is float16 \[64\]"),
        ({"zero": None}, "no tensor zero"),
    ],
)
def test_tensors_that_are_refused(changes, message, rng):
    tensors, _ = module(rng)
    given = {name: x for name, x in (tensors | changes).items() if x is not None}
    with pytest.raises(CheckpointError, match=f"{NAME}.*{message}"):
        registry.read(HQQ).check(given, NAME, (128, 16))


def test_groups_that_are_refused():
    with pytest.raises(CheckpointError, match=r"128 input channels in groups of 48: expected gro"):
        registry.read(hqq(group_size=48)).format(NAME, 128)
    with pytest.raises(CheckpointError, match="96 input channels in groups of 64"):
        registry.read(hqq(group_size=64)).format(NAME, 96)
    specs, _ = module(np.random.default_rng(0), (32, 1))
    specs |= {"W_q": np.zeros((1, 32), np.uint8)}
    with pytest.raises(CheckpointError, match="has 1 groups: expected an even number"):
        registry.read(HQQ).check(specs, NAME, (32, 1))
    quantized = HQQ["quant_config"] | {"zero_quant_params": {"nbits": 8}}
    with pytest.raises(
        CheckpointError, match=r"zero_quant_params is .* are quantised can't be read"
    ):
        registry.read(HQQ | {"quant_config": quantized})
    with pytest.raises(CheckpointError, match="'a': expected an object with weight_quant_params"):
        registry.read(HQQ | {"quant_config": {"a": 1}})
