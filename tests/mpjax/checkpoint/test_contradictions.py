"""Checkpoints whose config.json says something else than their tensors: right, or refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError, huggingface
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.cli import info
from tests.mpjax.checkpoint.test_huggingface import require_weights
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CONFIGS,
    FP8,
    FP8_SIZES,
    GPTQ,
    compressed_fp8,
    compressed_integers,
    linear_shapes,
    pack_module_fp8,
    pack_random,
    random_tensors,
    write_checkpoint,
)

CHANNEL, TENSOR, BLOCK = (
    compressed_fp8(strategy, activations)
    for strategy, activations in (("channel", "token"), ("tensor", "token"), ("block", "group"))
)
METHODS = {None: None, "awq": AWQ, "gptq": GPTQ, "gptq8": GPTQ | {"bits": 8}, "fp8": FP8}
METHODS |= {"channel": CHANNEL, "tensor": TENSOR, "block": BLOCK}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"

NF4 = {"bnb_4bit_quant_type": "nf4"}


def ignoring(is_said):
    """The warning of a quantization_config beside plain tensors, if it is expected."""
    message = "no tensor is quantised: it is ignored"
    return pytest.warns(UserWarning, match=message) if is_said else contextlib.nullcontext()


def write(folder, rng, stored, said, model="llama"):
    """Tensors as METHODS[stored] packs them, beside a config.json that says something else too.

    Returns the tensors, and the weights of the packed modules.
    """
    written = METHODS[stored]
    hf = CONFIGS[model] | (FP8_SIZES if stored in ("fp8", "channel", "tensor", "block") else {})
    hf |= {} if written is None else {"quantization_config": written}
    tensors, weights = random_tensors(hf, rng, np.float16), {}
    for name in linear_shapes(hf) if written else ():
        if written["quant_method"] in ("awq", "gptq"):
            weights[name] = pack_random(tensors, hf, name, rng)
        else:
            weights[name] = pack_module_fp8(tensors, written, name)
    write_checkpoint(folder, hf | said, tensors)
    return tensors, weights


def quantized(method, **changes):
    return {"quantization_config": METHODS[method] | changes}


# The tensors' kind, the words of config.json, and the words of the error.
REFUSED = [
    (
        None,
        {"vocab_size": 97},
        r"model.embed_tokens.weight is float16 \[96, 64\]: .* \[97, 64\], by",
    ),
    (
        None,
        {"vocab_size": 64},
        r"model.embed_tokens.weight is .* shape \[64, 64\], by config.json$",
    ),
    (
        None,
        {"hidden_size": 128},
        r"model.embed_tokens.weight is float16 \[96, 64\]: .* \[96, 128\]",
    ),
    (
        None,
        {"intermediate_size": 64},
        r"mlp.gate_proj.weight is float16 \[128, 64\]: .* \[64, 64\]",
    ),
    (None, {"num_key_value_heads": 4}, rf"{K}.weight is float16 \[32, 64\]: .* \[64, 64\]"),
    (None, {"num_key_value_heads": None}, rf"{K}.weight is float16 \[32, 64\]: .* \[64, 64\]"),
    (None, {"num_attention_heads": 8}, rf"{Q}.weight is float16 \[64, 64\]: .* \[128, 64\]"),
    (None, {"head_dim": 32}, rf"{Q}.weight is float16 \[64, 64\]: .* \[128, 64\]"),
    (
        None,
        {"num_hidden_layers": 1},
        "holds 9 tensors .*layers.1.* that the model has no place for",
    ),
    (None, {"num_hidden_layers": 3}, r"lacks 9 tensors \(model.layers.2"),
    (None, {"attention_bias": True}, "lacks 8 tensors .*bias"),
    (None, {"architectures": ["Qwen3ForCausalLM"]}, "lacks 4 tensors .*k_norm"),
    ("awq", quantized("awq", group_size=64), r"q_proj.qzeros is .* \[1, 8\], by group_size 64 in"),
    ("awq", quantized("awq", group_size=-1), r"q_proj.qzeros is .* \[1, 8\], by group_size -1 in"),
    ("awq", quantized("awq", group_size=48), "has 64 input channels: .* multiple of .* 48"),
    ("awq", quantized("awq", zero_point=False), r"q_proj.qzeros has zero .* \(zero_point: false\)"),
    ("awq", quantized("awq", version="gemv"), r"with another version, .* AWQ gemm .*: \"gemm\"$"),
    ("awq", quantized("gptq"), "quant_method 'gptq', but the tensors are packed as AWQ"),
    ("awq", quantized("fp8"), "quant_method 'fp8', but the tensors are packed as AWQ"),
    ("awq", {"quantization_config": None}, "no quantization_config, but .* packed as AWQ"),
    ("gptq", quantized("gptq", group_size=64), r"qzeros is .* by bits 4 and group_size 64 in"),
    ("gptq", quantized("gptq8"), "32 input and 64 output channels, by bits 8 in config.json"),
    ("gptq8", quantized("gptq"), "128 input and 64 output channels, by bits 4 in config.json"),
    ("gptq", quantized("gptq", sym=True), r"qzeros has zero points from 0 to 15.* \(sym: true\)"),
    ("gptq", quantized("gptq", dynamic={"-:.*": {}}), "a dynamic rule of config.json says"),
    ("gptq", quantized("gptq", dynamic={".*q_proj": {"group_size": 64}}), "and group_size 64 in"),
    ("gptq", quantized("gptq", dynamic={".*q_proj": {"sym": True}}), r"q_proj.* \(sym: true\)"),
    ("fp8", quantized("fp8", weight_block_size=[64, 128]), r"\[2, 1\], by quantization_config in"),
    ("fp8", quantized("channel"), rf"{Q} has no tensor weight_scale: .* \[128, 1\], by"),
    ("channel", quantized("tensor"), r"weight_scale is float32 \[128, 1\]: expected .* \[1\], by"),
    (
        "channel",
        quantized("block"),
        r"weight_scale is float32 \[128, 1\]: expected .* \[1, 1\], by",
    ),
    ("tensor", quantized("channel"), r"weight_scale is float32 \[1\]: expected .* \[128, 1\], by"),
    (
        "block",
        quantized("channel"),
        r"weight_scale is float32 \[1, 1\]: expected .* \[128, 1\], by",
    ),
    ("block", quantized("fp8"), rf"{Q} has no tensor weight_scale_inv"),
    ("fp8", quantized("awq"), "is an FP8 module .* config.json has no quantization_config with"),
]


@pytest.mark.parametrize(("stored", "said", "message"), REFUSED)
def test_refused(stored, said, message, tmp_path, rng, monkeypatch):
    write(tmp_path, rng, stored, said)
    if "zero points" not in message and "(sym" not in message and "zero_point" not in message:
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError, match=message) as caught:
        mpjax.load(tmp_path)
    assert "\n" not in str(caught.value)


# Facts that the tensors decide, and the words of config.json about them.
RIGHT = [
    ("awq", quantized("awq", modules_to_not_convert=["mlp", "q_proj"]), "W4g32A16KV16"),
    ("gptq", quantized("gptq", desc_act=True), "W4g32A16KV16"),
    ("gptq", quantized("gptq", lm_head=True), "W4g32A16KV16"),
    ("fp8", quantized("fp8", modules_to_not_convert=["mlp"]), "WFP8g128AFP8KV16"),
    ("channel", quantized("channel", ignore=["re:.*"]), "WFP8AFP8KV16"),
    (None, quantized("awq"), "W16A16KV16"),
    (None, quantized("gptq", sym=True), "W16A16KV16"),
    (None, quantized("fp8", activation_scheme="static"), "W16A16KV16"),
]


@pytest.mark.parametrize(("stored", "said", "precision"), RIGHT)
def test_right(stored, said, precision, tmp_path, rng):
    tensors, weights = write(tmp_path, rng, stored, said)
    with ignoring(stored is None):
        lm = mpjax.load(tmp_path)
    assert lm.precision == precision
    require_weights(lm.model, tensors, weights)
    with ignoring(stored is None):
        assert info.inspect(tmp_path).describe() == lm.describe()


def test_plain_tensors_are_quantised_whatever_config_json_calls_them(tmp_path, rng):
    for said in ("awq", "fp8", None):
        write(tmp_path, rng, None, {"quantization_config": METHODS[said]})
        with ignoring(said):
            lm = mpjax.load(tmp_path, precision="W8g64A16KV8")
        assert lm.precision == "W8g64A16KV8"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, **NF4}, "bitsandbytes"),
        (compressed_integers(), "compressed-tensors"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}, "auto-round"),
    ],
)
def test_what_config_json_says_of_plain_tensors_is_named(written, name, tmp_path, rng):
    write(tmp_path, rng, None, {"quantization_config": written})
    said = rf"{tmp_path}: config.json has a quantization_config \('{name}'\), and no tensor is quan"
    with pytest.warns(UserWarning, match=said):
        assert mpjax.load(tmp_path).precision == "W16A16KV16"


@pytest.mark.parametrize("stored", [None, "gptq", "fp8"])
def test_scales_of_a_cache_that_config_json_does_not_name(stored, tmp_path, rng):
    tensors, _ = write(tmp_path, rng, stored, {})
    for layer in range(2):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = np.ones(1, np.float32)
    write_checkpoint(tmp_path, huggingface.read_config(tmp_path), tensors)
    with pytest.raises(CheckpointError, match=r"holds 4 tensors \(.*k_scale.*no place for"):
        mpjax.load(tmp_path)
