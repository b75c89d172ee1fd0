"""Checkpoints whose modules have several formats, of both writers that mix them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import mixed, registry
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedScheme
from mpjax.checkpoint.schemes.mixed import MixedScheme
from mpjax.checkpoint.schemes.nvfp4 import NVFP4Scheme
from mpjax.checkpoint.schemes.pack_quantized import PackQuantizedScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.schemes.plain import random_plain
from tests.mpjax.checkpoint.write_checkpoint import (
    CACHE,
    LLAMA,
    compressed_fp8,
    compressed_integers,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
MLP = r"re:.*mlp\.(gate|up|down)_proj$"


def group(layout, targets):
    written = (
        compressed_fp8("channel", "token") if layout == FLOATS else compressed_integers(layout)
    )
    [found] = written["config_groups"].values()
    return found | {"targets": targets, "format": layout}


def mixture(*groups, layout="mixed-precision"):
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return compressed_integers() | {"format": layout, "config_groups": named}


TWO = mixture(group(PACKED, ["Linear"]), group(INTEGERS, [MLP]))
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "a.q_proj": {"quant_algo": "FP8"},
        "a.experts.*": {"quant_algo": "NVFP4", "group_size": 16},
        "a.up": {"quant_algo": "W4A16_NVFP4"},
    },
}


@pytest.fixture(scope="module")
def stored():
    """The tensors of a model of both formats, and those of the plain one with its weights."""
    rng = np.random.default_rng(5)
    quantized = dict(plain := random_tensors(LLAMA, rng))
    scheme = registry.read(TWO)
    for seed, (name, shape) in enumerate(linear_shapes(LLAMA).items()):
        own = scheme.of_module(name)
        format = "int8" if "mlp" in name else "uint4:g32:sym"
        found = own.encode(random_plain(format, shape, seed), name)
        tensors = {suffix: np.asarray(array) for suffix, array in found.items()}
        tensors["weight_scale"] = tensors["weight_scale"].astype(np.float16)
        replace_module(quantized, name, tensors)
        weight = scheme.dequantize(tensors, name, shape)
        plain[f"{name}.weight"] = np.ascontiguousarray(np.asarray(weight).T)
    return quantized, plain


def test_a_module_has_the_scheme_of_its_group():
    scheme = registry.read(TWO)
    assert isinstance(scheme, MixedScheme)
    assert type(scheme.of_module("model.layers.0.mlp.up_proj")) is IntQuantizedScheme
    assert type(scheme.of_module("model.layers.0.self_attn.q_proj")) is PackQuantizedScheme
    assert [str(format) for format in scheme.formats] == ["uint4:g32", "int8:gK/int8"]
    assert scheme.weights == scheme.format("q_proj", 64) == WeightFormat("uint4", 32)
    assert (scheme.quant_method, scheme.loss, scheme.target) == ("compressed-tensors", None, None)
    assert "input_zero_point" in scheme.ignored
    assert scheme.for_experts() == scheme
    assert scheme.rounded_to(WeightFormat("uint4", 32)) is None
    assert not scheme.has_cache_scales
    assert registry.read(TWO | {"kv_cache_scheme": CACHE}).has_cache_scales
    found = {tuple(map(str, choice.formats)) for choice in scheme.choices}
    assert found == {("uint4:g32", "int8:gK/int8"), ("uint4:g32", "uint8:gK")}


@pytest.mark.parametrize(
    "target",
    [
        r"re:.*language_model\.layers.*mlp",
        r"re:language_model\.model\.layers\..*mlp",
        "model.language_model.layers.0.mlp.up_proj",
    ],
)
def test_targets_have_the_names_in_files_that_also_read_images(target):
    scheme = registry.read(mixture(group(PACKED, ["Linear"]), group(INTEGERS, [target])))
    assert type(scheme.of_module("model.layers.0.mlp.up_proj")) is IntQuantizedScheme
    assert type(scheme.of_module("model.layers.0.self_attn.q_proj")) is PackQuantizedScheme


def test_logits_are_those_of_the_dequantised_model(stored, tmp_path):
    quantized, plain = stored
    folder = write_checkpoint(tmp_path / "q", LLAMA | {"quantization_config": TWO}, quantized)
    expected = mpjax.load(write_checkpoint(tmp_path / "p", LLAMA, plain), dtype="float32")
    tokens = np.arange(8, dtype=np.int32)[None]
    want = np.asarray(expected.model(tokens))
    own = mpjax.load(folder, dtype="float32")
    assert own.precision == "W4g32symA32+W8A8KV16"
    wide = mpjax.load(folder, precision="W4g32+W8gKA32KV16")
    assert wide.precision == "W4g32sym+W8gKsymA32KV16"
    np.testing.assert_allclose(wide.model(tokens), want, atol=1e-4 * abs(want).max())
    # Inputs of the MLPs are rounded to eight bits.
    assert 0 < abs(np.asarray(own.model(tokens)) - want).max() < 0.1 * abs(want).max()
    message = r"mixed-precision checkpoint of W4g32.W8A8 that can't be quantised again: ask for"
    with pytest.raises(ValueError, match=f"{message} W4g32.W8gKA16KV8 or W4g32A16.W8A8KV8"):
        mpjax.load(folder, precision="W4g32A16KV8")


def test_equal_groups_are_one_scheme():
    halves = mixture(group(FLOATS, ["Linear"]), group(FLOATS, [MLP]), layout=FLOATS)
    assert type(registry.read(halves)) is FP8Scheme
    assert type(registry.read(mixture(group(INTEGERS, ["Linear"])))) is IntQuantizedScheme
    both = mixture(group(PACKED, ["Linear"]), group(PACKED, [MLP]), layout=PACKED)
    assert type(registry.read(both)) is PackQuantizedScheme
    assert mixed.split(both) is mixed.split({"quant_method": "gptq"}) is None


def test_modelopt_lists_the_algorithm_of_each_module():
    scheme = registry.read(MODELOPT | {"kv_cache_quant_algo": "FP8"})
    assert isinstance(scheme, MixedScheme)
    assert type(scheme.of_module("a.q_proj")) is FP8Scheme
    for name in ("a.experts.3.up_proj", "a.up"):
        assert type(scheme.of_module(name)) is NVFP4Scheme
    assert scheme.has_cache_scales
    assert scheme.may_lack_cache_scales
    assert scheme.loss is not None
    assert scheme.loss.startswith("NVFP4 is rounded to W8g32")
    assert scheme.unsupported_activations is None
    assert not scheme.for_experts().of_module("a.q_proj").is_static
    weight = np.ones((4, 32), ml_dtypes.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": np.array(0.5, np.float32)}
    tensors["input_scale"] = np.array(0.25, np.float32)
    assert scheme.check(tensors, "a.q_proj") == (32, 4)
    np.testing.assert_array_equal(scheme.decode(tensors, "a.q_proj").scales, np.full((1, 4), 0.5))
    with pytest.raises(
        CheckpointError, match=r"a.k_proj is quantised, but config.json names no for"
    ):
        scheme.of_module("a.k_proj")


def test_what_each_part_holds():
    assert registry.read(TWO).contents == (
        f"Linear: pack-quantized, codes kept as W4g32; {MLP}: int-quantized, codes kept as W8A8"
    )
    layers = {f"layers.{number}.up": {"quant_algo": "FP8"} for number in range(5)}
    layers["head"] = {"quant_algo": "NVFP4", "group_size": 16}
    assert registry.read(MODELOPT | {"quantized_layers": layers}).contents == (
        "layers.0.up, layers.1.up and 3 more: FP8, codes kept as WFP8gK, with static scales of "
        "activations; head: NVFP4, rounded to W8g32"
    )


def test_parts_that_round_are_rounded_together():
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A16_NVFP4"}}
    scheme = registry.read(MODELOPT | {"quantized_layers": layers})
    assert type(scheme) is NVFP4Scheme  # equal parts
    parts = mixed.Part(("a",), scheme), mixed.Part(("b",), scheme)
    rounded = MixedScheme(parts).rounded_to(WeightFormat("uint4", 32))
    assert rounded is not None
    assert rounded.target == WeightFormat("uint4", 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mixture({"targets": ["Linear"]}), "group 'group_0' has no format of its own, as mixed-pr"),
        (mixture(group("marlin", ["Linear"])), "format is 'marlin': expected 'pack-quantized' or"),
        (mixture(group(PACKED, "Linear")), "targets is 'Linear': expected a list of texts"),
        (mixture(group(PACKED, ["re:("])), "is not a regular expression"),
        (
            compressed_integers() | {"format": "mixed-precision", "config_groups": [1]},
            "is .1.: exp",
        ),
    ],
)
def test_mixtures_that_are_refused(config, message):
    with pytest.raises(CheckpointError, match=message):
        registry.read(config)
    with pytest.raises(CheckpointError, match="expected modules in several formats"):
        MixedScheme.from_config(config)
