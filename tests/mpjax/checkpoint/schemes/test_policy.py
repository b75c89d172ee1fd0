"""Policies: modules with settings of their own, checkpoints of several formats, activations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import modelopt, policy, registry
from mpjax.checkpoint.schemes.fp8 import FP8Reader
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedReader
from mpjax.checkpoint.schemes.pack_quantized import PackQuantizedReader
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.schemes.modules import AUTO_ROUND, FORMS, MODELOPT
from tests.mpjax.checkpoint.write_checkpoint import (
    CACHE,
    FP8,
    GPTQ,
    HQQ,
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
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"


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
MIXED = MODELOPT | {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "a.q_proj": {"quant_algo": "FP8"},
        "a.experts.*": {"quant_algo": "NVFP4", "group_size": 16},
        "a.up": {"quant_algo": "W4A16_NVFP4"},
    },
}


def test_the_first_dynamic_rule_of_gptq_that_matches_counts():
    found = registry.read(
        GPTQ
        | {
            "sym": True,
            "dynamic": {
                r"-:model\.layers\.0\..*": {},
                r"-:model\.language_model\.layers\.4\.": {},
                "-:mlp": {},
                r"+:.*\.down_proj": {"bits": 8, "damp_percent": 0.1},
                r".*\.mlp\..*": {"group_size": 64},
                r"model\.layers\.2\..*": {"bits": 8, "group_size": -1, "sym": False},
            },
        }
    )
    for name, expected in (
        ("model.layers.1.mlp.down_proj", (8, 32, True)),
        ("model.layers.2.mlp.up_proj", (4, 64, True)),
        ("model.layers.2.self_attn.q_proj", (8, None, False)),
        ("model.layers.3.self_attn.q_proj", (4, 32, True)),
    ):
        reader = found.reader(name)
        assert (reader.bits, reader.group_size, reader.symmetric) == expected  # type: ignore[attr-defined]
    assert found.formats == (WeightFormat("uint4", 32),)
    # Patterns match from the start of a path, also of the names in files that also read images.
    for name in (DOWN, "model.layers.4.mlp.up_proj", "mlp.up"):
        with pytest.raises(CheckpointError, match=r"by a dynamic rule in config\.json it was left"):
            found.reader(name)


def test_auto_round_and_hqq_name_modules_too():
    extra = {DOWN: {"bits": 8, "group_size": 64, "act_bits": 16}, "lm_head": {"bits": 16}}
    found = registry.read(AUTO_ROUND | {"extra_config": extra})
    assert (found.reader(DOWN).bits, found.reader(DOWN).group_size) == (8, 64)  # type: ignore[attr-defined]
    assert found.reader("model.layers.10.mlp.down_proj").bits == 4  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="lm_head has packed tensors, but by a dynamic rule"):
        found.reader("lm_head")
    usual = HQQ["quant_config"]
    eight = usual | {"weight_quant_params": usual["weight_quant_params"] | {"nbits": 8}}
    found = registry.read(HQQ | {"quant_config": {"mlp.down_proj": eight, "mlp.up_proj": usual}})
    assert str(found.reader(DOWN).format(DOWN, 128)) == "affine8:g32"
    assert str(found.reader(UP).format(UP, 64)) == "affine4:g32"
    assert found.contents == "HQQ, codes kept as WM8"
    assert found.loss == "scales and minima of HQQ to float16"
    with pytest.raises(CheckpointError, match=r"k_proj is an HQQ module, but .* only"):
        found.reader("a.k_proj")


def test_groups_of_pack_quantized():
    [usual] = compressed_integers()["config_groups"].values()
    named = {
        "names": usual | {"targets": [DOWN], "weights": usual["weights"] | {"num_bits": 8}},
        "all": usual,
        "pattern": usual
        | {"targets": ["re:.*mlp"], "weights": usual["weights"] | {"group_size": 64}},
    }
    written = compressed_integers() | {"config_groups": named}
    written |= {"ignore": ["lm_head", "re:.*o_proj$"]}
    found = registry.read(written)
    assert str(found.reader(DOWN).format(DOWN, 128)) == "uint8:g32"
    assert str(found.reader(UP).format(UP, 128)) == "uint4:g64"
    assert found.reader(QUERY).weights == found.formats[0] == WeightFormat("uint4", 32)
    with pytest.raises(CheckpointError, match="o_proj has packed tensors, but by `ignore` in conf"):
        found.reader("model.layers.0.self_attn.o_proj")
    del named["all"]
    with pytest.raises(CheckpointError, match=r"q_proj is a pack-quantized module, but"):
        registry.read(written).reader(QUERY)
    for order, has_order in [("weight", False), ("group", True), ("dynamic", True), (True, True)]:
        assert registry.read(compressed_integers(actorder=order)).reader(UP).has_order is has_order  # type: ignore[attr-defined]
    assert registry.read(compressed_integers(symmetric=None)).reader(UP).integers.symmetric  # type: ignore[attr-defined]


def test_names_and_patterns():
    targets = ["re:.*mlp", "model.head"]
    assert policy.names(targets, "a.mlp.up")
    assert policy.names(targets, "model.head")
    assert not policy.names(targets, "model.head2")
    assert not policy.names(["re:mlp"], "a.mlp")  # from the start
    assert not policy.names([], "a")


def test_a_module_has_the_format_of_its_group():
    found = registry.read(TWO)
    assert type(found.reader(UP)) is IntQuantizedReader
    assert type(found.reader(QUERY)) is PackQuantizedReader
    assert [str(format) for format in found.formats] == ["uint4:g32", "int8:gK/int8"]
    assert (found.method, found.loss, found.target) == ("compressed-tensors", None, None)
    assert "input_zero_point" in found.ignored
    assert found.for_experts() == found
    assert found.rounded_to(WeightFormat("uint4", 32)) is None
    assert registry.read(TWO | {"kv_cache_scheme": CACHE}).has_cache_scales
    choices = {tuple(map(str, choice.formats)) for choice in found.choices}
    assert choices == {("uint4:g32", "int8:gK/int8"), ("uint4:g32", "uint8:gK")}
    # Equal groups are one part.
    halves = mixture(group(FLOATS, ["Linear"]), group(FLOATS, [MLP]), layout=FLOATS)
    for written, reader in (
        (halves, FP8Reader),
        (mixture(group(INTEGERS, ["Linear"])), IntQuantizedReader),
        (
            mixture(group(PACKED, ["Linear"]), group(PACKED, [MLP]), layout=PACKED),
            PackQuantizedReader,
        ),
    ):
        [part] = registry.read(written).parts
        assert part.scheme.reader is reader


@pytest.mark.parametrize(
    "target",
    [
        r"re:.*language_model\.layers.*mlp",
        r"re:language_model\.model\.layers\..*mlp",
        "model.language_model.layers.0.mlp.up_proj",
    ],
)
def test_targets_have_the_names_in_files_that_also_read_images(target):
    found = registry.read(mixture(group(PACKED, ["Linear"]), group(INTEGERS, [target])))
    assert type(found.reader(UP)) is IntQuantizedReader
    assert type(found.reader(QUERY)) is PackQuantizedReader


def test_a_mixture_has_the_logits_of_its_weights(tmp_path):
    rng = np.random.default_rng(5)
    quantized = dict(plain := random_tensors(LLAMA, rng))
    for name, shape in linear_shapes(LLAMA).items():
        tensors, weight = FORMS["int" if "mlp" in name else "pack"].module(rng, shape)
        tensors["weight_scale"] = tensors["weight_scale"].astype(np.float16)
        replace_module(quantized, name, tensors)
        weight = registry.read(TWO).reader(name).dequantize(tensors, name, shape)
        plain[f"{name}.weight"] = np.ascontiguousarray(np.asarray(weight).T)
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


def test_modelopt_lists_the_algorithm_of_each_module():
    found = registry.read(MIXED)
    titles = {part.targets: part.scheme.title for part in found.parts}
    assert found.part("a.experts.7.w").scheme.title == "NVFP4" == found.part("a.up").scheme.title
    assert titles[("a.q_proj",)] == "FP8"
    assert found.reader("a.q_proj").activations.are_static
    tensors = {"weight": np.ones((4, 32), ml_dtypes.float8_e4m3fn)}
    tensors |= {key: np.array(0.5, np.float32) for key in ("weight_scale", "input_scale")}
    scales = found.reader("a.q_proj").decode(tensors, "a.q_proj").scales
    np.testing.assert_array_equal(scales, np.full((1, 4), 0.5))
    with pytest.raises(CheckpointError, match=r"a\.k_proj is quantised, but .* names no format"):
        found.reader("a.k_proj")
    rounds = registry.read(MIXED | {"quantized_layers": {"a": {"quant_algo": "NVFP4"}}})
    assert rounds.rounded_to(WeightFormat("uint4", 32)).target == WeightFormat("uint4", 32)


def test_what_each_part_holds():
    assert registry.read(TWO).contents == (
        f"Linear: pack-quantized, codes kept as W4g32; {MLP}: int-quantized, codes kept as W8A8"
    )
    layers = {f"layers.{number}.up": {"quant_algo": "FP8"} for number in range(5)}
    layers["head"] = {"quant_algo": "NVFP4", "group_size": 16}
    assert registry.read(MIXED | {"quantized_layers": layers}).contents == (
        "layers.0.up, layers.1.up and 3 more: FP8, codes kept as WFP8gK, with static scales of "
        "activations; head: NVFP4, rounded to W8g32"
    )


def activations(config, **changes):
    [each] = config["config_groups"].values()
    written = (each["input_activations"] or {}) | changes
    return config | {"config_groups": {"group_0": each | {"input_activations": written}}}


@pytest.mark.parametrize(
    ("written", "what"),
    [
        (FP8 | {"activation_scheme": "static"}, "FP8 with static scales"),
        (compressed_fp8("block", "tensor", False), "8-bit float with static scales"),
        (compressed_fp8("channel", "tensor"), "dynamic scales (strategy 'tensor')"),
        (compressed_fp8("block", "token"), "dynamic scales (strategy 'token')"),
        (compressed_fp8("channel", "group"), "dynamic scales (groups of 128)"),
        (activations(compressed_fp8("channel", "token"), type="int"), "8-bit int with dynamic"),
        (
            activations(compressed_integers(INTEGERS), dynamic=False),
            "8-bit int with static scales (strategy 'token')",
        ),
        (
            activations(compressed_integers(INTEGERS), symmetric=False),
            "8-bit int with zero points and dynamic scales (strategy 'token')",
        ),
        (
            activations(compressed_integers(INTEGERS), strategy="group", group_size=128),
            "8-bit int with dynamic scales (groups of 128)",
        ),
        (
            activations(
                compressed_integers(), num_bits=8, type="float", dynamic=True, strategy="token"
            ),
            "8-bit float with dynamic scales (strategy 'token')",
        ),
    ],
)
def test_activations_that_a_precision_must_choose(written, what):
    found = registry.read(written)
    assert what in (found.unsupported_activations or "")
    assert found.reader(DOWN).activations.operand is None
    assert not any(choice.unsupported_activations for choice in found.choices)


@pytest.mark.filterwarnings("ignore:scales in float32 are rounded")
def test_static_zero_points_of_activations_lie_unread_beside_the_maps(tmp_path, rng):
    static = {"strategy": "tensor", "dynamic": False, "symmetric": False}
    written = activations(compressed_integers(INTEGERS), **static)
    tensors, weights = random_tensors(LLAMA, rng), {}
    for name, shape in linear_shapes(LLAMA).items():
        module, weights[name] = FORMS["int"].module(rng, shape)
        zero = {"input_zero_point": np.zeros(1, np.int8), "input_scale": np.ones(1, np.float32)}
        replace_module(tensors, name, module | zero)
    write_checkpoint(tmp_path, LLAMA | {"quantization_config": written}, tensors)
    with pytest.raises(CheckpointError, match=r"zero points and static scales.*: ask for"):
        mpjax.load(tmp_path)
    for precision, most in (("W8gKA16KV16", 2**-11), ("W8A8KV16", 0)):
        model = mpjax.load(tmp_path, precision=precision).model
        for place in model.linear_places(model.config):
            found = np.concatenate([kernel.dequantize() for kernel in place.kernels(model)], 1)
            expected = np.concatenate([weights[name] for name in place.names], 1)
            assert (abs(found - expected) <= abs(expected) * most).all()


def test_float32_scales_beside_activations_of_16_bits_are_rounded_with_a_warning(tmp_path, rng):
    tensors = random_tensors(LLAMA, rng)
    for name, shape in linear_shapes(LLAMA).items():
        replace_module(tensors, name, FORMS["int"].module(rng, shape)[0])
    hf = LLAMA | {"quantization_config": compressed_integers(INTEGERS)}
    write_checkpoint(tmp_path, hf, tensors)
    with pytest.warns(match=r"to float16, in which W8gK keeps them: by 0\.05% at most$"):
        mpjax.load(tmp_path, precision="W8gKA16KV16")
    mpjax.load(tmp_path, precision="W8A8KV16")


def test_scales_for_an_fp8_cache_of_modelopt():
    config, scheme = MODELOPT | {"quant_algo": "FP8"}, {"type": "float", "num_bits": 8}
    for more, expected in (
        ({}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
        ({"kv_cache_scheme": scheme}, True),
        ({"kv_cache_scheme": scheme | {"num_bits": 4}}, False),
    ):
        found = registry.read(config | more)
        assert (found.has_cache_scales, found.may_lack_cache_scales) == (expected, True)
    written = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    assert modelopt.from_older(written) == config | {"kv_cache_quant_algo": None}
    assert modelopt.from_older({}) is None
