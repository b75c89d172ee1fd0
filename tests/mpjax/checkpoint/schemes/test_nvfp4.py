"""NVFP4 of both writers, for all codes and all scales, against NumPy in float64."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.nvfp4 import NVFP4Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack
from tests.mpjax.checkpoint.write_checkpoint import (
    LLAMA,
    SQUARE,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

E4M3 = ml_dtypes.float8_e4m3fn
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE = np.concatenate([VALUES, -VALUES])


def module(config, rng, shape=(32, 256)):
    """The tensors of a module of all codes and scales, and its weight float64 [N, K]."""
    outputs, channels = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    bits = np.arange(outputs * channels // 16, dtype=np.int64) % 127  # positive, without NaN
    scales = bits.astype(np.uint8).view(E4M3).reshape(outputs, -1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    wide = np.repeat(scales.astype(np.float64), 16, axis=1)
    if config is COMPRESSED:
        tensors = {"weight_packed": packed, "weight_scale": scales}
        tensors["weight_global_scale"] = np.float32([96.0])
        return tensors, TABLE[codes] * wide / 96
    tensors = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": np.array(2**-6, np.float32),
    }
    return tensors, TABLE[codes] * wide * 2**-6


@pytest.mark.parametrize("config", [COMPRESSED, MODELOPT], ids=["compressed", "modelopt"])
def test_all_codes_and_scales(config, rng):
    tensors, expected = module(config, rng)
    scheme = registry.read(config)
    assert type(scheme) is registry.of_module(tensors) is NVFP4Scheme
    assert scheme.check(tensors, "a", (256, 32)) == (256, 32)
    found = np.asarray(scheme.dequantize(tensors, "a"))
    np.testing.assert_allclose(found, expected.T, rtol=2e-7)
    if config is MODELOPT:  # products with a power of two are exact
        np.testing.assert_array_equal(found, expected.T)
    rounded = pack(scheme.decode(tensors, "a")).dequantize()
    groups = np.concatenate([expected.T, 0 * expected.T]).reshape(2, 8, 32, 32)
    steps = np.ptp(groups, axis=(0, 2))[:, None] / 255
    assert (abs(np.asarray(rounded) - expected.T).reshape(8, 32, 32) <= 0.6 * steps + 2e-5).all()
    four = scheme.rounded_to(WeightFormat("uint4", 128)).decode(tensors, "a")
    assert str(four.format) == "uint4:g128"


@pytest.mark.sweep  # for the packages take long to import
def test_the_package_of_the_format_agrees(rng):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    tensors, _ = module(COMPRESSED, rng)
    unpacked = helpers.unpack_fp4_from_uint8(
        torch.tensor(tensors["weight_packed"]), 32, 256, dtype=torch.float32
    )
    steps = tensors["weight_scale"].astype(np.float32) / tensors["weight_global_scale"]
    expected = unpacked.numpy() * np.repeat(steps, 16, axis=1)
    found = registry.read(COMPRESSED).dequantize(tensors, "a").T
    np.testing.assert_array_equal(found, expected)


def test_a_whole_checkpoint(tmp_path, rng):
    hf = LLAMA | SQUARE | {"num_hidden_layers": 1, "torch_dtype": "float32"}
    tensors, plain = random_tensors(hf, rng), {}
    for name, (channels, outputs) in linear_shapes(hf).items():
        packed, weight = module(MODELOPT, rng, (outputs, channels))
        packed["input_scale"] = np.ones((), np.float32)
        plain[f"{name}.weight"] = weight.astype(np.float32)
        replace_module(tensors, name, packed)
    write_checkpoint(tmp_path / "a", hf, tensors)
    (tmp_path / "a" / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}'
    )
    write_checkpoint(tmp_path / "b", hf, tensors_without(tensors, plain))
    tokens = jnp.asarray([[1, 2, 3]])
    expected = mpjax.load(tmp_path / "b").model(tokens)
    exact = mpjax.load(tmp_path / "a", precision="W16A16KV16", dtype="float32")
    np.testing.assert_allclose(exact.model(tokens), expected, atol=1e-4)
    assert mpjax.load(tmp_path / "a").precision == "W8g32A32KV16"


def tensors_without(tensors, plain):
    names = {name.removesuffix(".weight") for name in plain}
    return {k: v for k, v in tensors.items() if k.rpartition(".")[0] not in names} | plain


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"weight_scale": np.zeros((32, 8), E4M3)},
            r"weight_scale is float8_e4m3fn \[32, 8\]: ",
        ),
        ({"weight_scale_2": np.zeros(3, np.float32)}, r"weight_scale_2 is float32 \[3\]: expected"),
        (
            {"weight_scale_2": np.array(np.nan, np.float32)},
            "512 of the 512 scales are NaN or infinite",
        ),
        ({"weight": np.zeros((32, 4), np.uint8)}, "a has 8 input channels: expected a multiple of"),
    ],
)
def test_modules_that_are_refused(change, said, rng):
    tensors, _ = module(MODELOPT, rng)
    with pytest.raises(CheckpointError, match=said):
        registry.read(MODELOPT).dequantize(tensors | change, "a")


def test_other_groups_are_refused():
    groups = {"group_0": {"weights": WEIGHTS | {"group_size": 32}}}
    with pytest.raises(CheckpointError, match="group_size is 32: expected 16"):
        registry.read(COMPRESSED | {"config_groups": groups})


def test_scales_of_the_cache_are_read(tmp_path, rng):
    """Those of compressed-tensors, and those of ModelOpt, which lie beside the maps."""
    hf = LLAMA | SQUARE | {"num_hidden_layers": 1}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    for config, prefix in ((COMPRESSED, ""), (MODELOPT, "{}_proj.")):
        tensors = random_tensors(hf, rng)
        for name, (channels, outputs) in linear_shapes(hf).items():
            replace_module(tensors, name, module(config, rng, (outputs, channels))[0])
        for side in "kv":
            name = f"model.layers.0.self_attn.{prefix.format(side)}{side}_scale"
            tensors[name] = np.full(1, 0.5, np.float32)
        written = hf | {"quantization_config": config | {"kv_cache_scheme": cache}}
        write_checkpoint(tmp_path / (folder := config["quant_method"]), written, tensors)
        scales = mpjax.load(tmp_path / folder, precision="A16KVfp8").model.cache_scales
        np.testing.assert_array_equal(scales.get_value(), 0.5)
