"""Checkpoints whose config.json says something else than their tensors: right, or refused."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError, huggingface
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.cli import info
from tests.mpjax.checkpoint.schemes.modules import FORMS
from tests.mpjax.checkpoint.test_huggingface import require_weights
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    FP8,
    LLAMA,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def ignoring(is_said):
    """The warning of a quantization_config beside plain tensors, if it is expected."""
    message = "no tensor is quantised: it is ignored"
    return pytest.warns(UserWarning, match=message) if is_said else contextlib.nullcontext()


def write(folder, rng, form, said):
    """Tensors in a form, or plain ones, beside a config.json that says something else too.

    Returns the tensors, and the weights of the packed modules.
    """
    hf = LLAMA | ({} if form is None else {"quantization_config": FORMS[form].config})
    tensors, weights = random_tensors(hf, rng, np.float16), {}
    for name, shape in linear_shapes(hf).items() if form else ():
        module, weights[name] = FORMS[form].module(rng, shape)
        replace_module(tensors, name, module)
    write_checkpoint(folder, hf | said, tensors)
    return tensors, weights


def config(form, **changes):
    """The `quantization_config` of a form with other values."""
    return {"quantization_config": FORMS[form].config | changes}


def group(form, **changes):
    """The `quantization_config` of a form with other values of the weights of its only group."""
    written = copy.deepcopy(FORMS[form].config)
    written["config_groups"]["group_0"]["weights"] |= changes
    return {"quantization_config": written}


NONE = {"quantization_config": None}
# The tensors' form, the words of config.json, and those of the error.
REFUSED = [
    (None, {"vocab_size": 97}, r"embed_tokens.weight is float16 \[96, 64\]: .* \[97, 64\], by"),
    (None, {"intermediate_size": 64}, r"gate_proj.weight is float16 \[128, 64\]: .* \[64, 64\]"),
    (None, {"num_key_value_heads": 4}, rf"{K}.weight is float16 \[32, 64\]: .* \[64, 64\]"),
    (None, {"head_dim": 32}, rf"{Q}.weight is float16 \[64, 64\]: .* \[128, 64\]"),
    (None, {"num_hidden_layers": 1}, "holds 9 tensors .*layers.1.* that the model has no place"),
    (None, {"num_hidden_layers": 3}, r"lacks 9 tensors \(model.layers.2"),
    (None, {"attention_bias": True}, "lacks 8 tensors .*bias"),
    (None, {"architectures": ["Qwen3ForCausalLM"]}, "lacks 4 tensors .*k_norm"),
    ("awq", config("awq", group_size=64), r"q_proj.qzeros is .* \[1, 8\], by group_size 64 in"),
    ("awq", config("awq", group_size=48), "has 64 input channels: .* multiple of .* 48"),
    ("awq", config("gemv"), r"with another version, .* AWQ gemm .*: \"gemm\"$"),
    ("awq", config("gptq"), "quant_method 'gptq', but the tensors are packed as AWQ"),
    ("awq", NONE, "no quantization_config, but .* packed as AWQ"),
    ("gptq", config("gptq", group_size=64), r"qzeros is .* by bits 4 and group_size 64 in"),
    ("gptq", config("gptq", bits=8), "32 input and 64 output channels, by bits 8 in config.json"),
    ("gptq", config("gptq", dynamic={"-:.*": {}}), "by a dynamic rule in config.json it was left"),
    ("gptq", config("gptq", dynamic={".*q_proj": {"group_size": 64}}), "and group_size 64 in"),
    ("fp8", config("fp8", weight_block_size=[32, 128]), r"\[2, 1\], by quantization_config in"),
    ("fp8-channels", config("fp8-one-scale"), r"float32 \[64, 1\]: expected .* \[1\], by"),
    ("fp8", NONE, r"q_proj is an FP8 module \(weight, weight_scale_inv\), but config.json"),
    ("pack", group("pack", group_size=64), rf"{Q}.weight_scale is \w+ \[64, 2\]: .* \[64, 1\], by"),
    ("pack", group("pack", strategy="channel"), r"scale is .*: .* \[64, 1\], by num_bits 4 and"),
    ("pack", group("pack", symmetric=False), r"no tensor weight_zero_point: expected int32 \[8, 2"),
    ("pack", group("pack", actorder="group"), r"no tensor weight_g_idx: expected int32 \[64\]"),
    ("pack", config("pack", ignore=["re:.*q_proj"]), rf"{Q} has packed tensors, but by `ignore`"),
    ("pack", config("pack", format="int-quantized"), "weights: num_bits is 4: expected 8"),
    *(
        ("pack", config(form), "json has no .* 'compressed-tensors'")
        for form in ("awq", "gptq", "fp8")
    ),
    ("pack", config("fp8-channels"), "is a pack-quantized module .* with another format"),
    ("pack-zeros", group("pack", symmetric=True), "weight_zero_point, which by symmetric in"),
    ("int", group("int", strategy="tensor"), r"float32 \[64, 1\]: expected .* \[1\]"),
    ("int", config("int", format="pack-quantized"), "made for activations in 8-bit int with dyn"),
]


@pytest.mark.parametrize(("form", "said", "message"), REFUSED)
def test_refused(form, said, message, tmp_path, rng, monkeypatch):
    """Before a tensor is read."""
    write(tmp_path, rng, form, said)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError, match=message) as caught:
        mpjax.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_tensors_of_one_module(tmp_path, rng):
    for form, suffix, change, message in (
        ("pack", "weight_scale", lambda a: a * np.float16("nan"), "scales are NaN or infinite"),
        ("int", "weight_scale", None, rf"{Q}.weight is int8 \[64, 64\]: expected bfloat16"),
        ("int", "weight", lambda a: a.astype(np.uint8), "q_proj is an FP8 module .* with another"),
        ("fp8", "weight", None, rf"lacks 1 tensor \({Q}.weight\)"),
    ):
        tensors, _ = write(tmp_path, rng, form, {})
        array = tensors.pop(f"{Q}.{suffix}")
        tensors |= {} if change is None else {f"{Q}.{suffix}": change(array)}
        write_checkpoint(tmp_path, huggingface.read_config(tmp_path), tensors)
        with pytest.raises(CheckpointError, match=message):
            mpjax.load(tmp_path)


# Facts that the tensors decide, and the words of config.json about them.
RIGHT = [
    ("awq", config("awq", modules_to_not_convert=["mlp", "q_proj"]), "W4g32A16KV16"),
    ("gptq", config("gptq", desc_act=True), "W4g32A16KV16"),
    ("fp8", config("fp8", modules_to_not_convert=["mlp"]), "WFP8g128AFP8KV16"),
    ("fp8-channels", config("fp8-channels", ignore=["re:.*"]), "WFP8AFP8KV16"),
    (None, config("awq"), "W16A16KV16"),
]


@pytest.mark.parametrize(("form", "said", "precision"), RIGHT)
def test_right(form, said, precision, tmp_path, rng):
    tensors, weights = write(tmp_path, rng, form, said)
    with ignoring(form is None):
        lm = mpjax.load(tmp_path)
    assert lm.precision == precision
    require_weights(lm.model, tensors, weights)
    with ignoring(form is None):
        assert info.inspect(tmp_path).describe() == lm.describe()


def test_plain_tensors_are_quantised_whatever_config_json_calls_them(tmp_path, rng):
    for said in (AWQ, FP8, None):
        write(tmp_path, rng, None, {"quantization_config": said})
        with ignoring(said):
            lm = mpjax.load(tmp_path, precision="W8g64A16KV8")
        assert lm.precision == "W8g64A16KV8"


@pytest.mark.parametrize("form", ["mxfp4", "nf4", "pack", "auto-round"])
def test_what_config_json_says_of_plain_tensors_is_named(form, tmp_path, rng):
    write(tmp_path, rng, None, config(form))
    name = FORMS[form].config["quant_method"]
    said = rf"{tmp_path}: config.json has a quantization_config \('{name}'\), and no tensor is quan"
    with pytest.warns(UserWarning, match=said):
        assert mpjax.load(tmp_path).precision == "W16A16KV16"


@pytest.mark.parametrize("form", [None, "gptq", "fp8"])
def test_scales_of_a_cache_that_config_json_does_not_name(form, tmp_path, rng):
    tensors, _ = write(tmp_path, rng, form, {})
    for layer in range(2):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = np.ones(1, np.float32)
    write_checkpoint(tmp_path, huggingface.read_config(tmp_path), tensors)
    with pytest.raises(CheckpointError, match=r"holds 4 tensors \(.*k_scale.*no place for"):
        mpjax.load(tmp_path)
