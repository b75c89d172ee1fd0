"""Static activations against transformers, whose linear maps round their inputs beforehand.

Where compressed-tensors is installed, transformers also loads the folder itself: compressed-tensors
then rounds activations to codes and back.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.checkpoint.huggingface import open_headers
from mpjax.checkpoint.outlook import look
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import (
    compressed_fp8,
    compressed_integers,
    replace_module,
)
from tests.sweeps import in_sweep

# Asked for here, too: a module whose import was skipped once can't be imported again.
pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.mpjax.checkpoint.test_huggingface_parity import (
    VOCABULARY,
    as_transformers_reads,
    build,
    edit_config,
    reference_logits,
    torch,
)

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))
LARGEST = {"int": 127.0, "float": 448.0}
# What codes of each type are rounded to, and what config.json says.
WRITTEN = {
    "int": compressed_integers("int-quantized"),
    "float": compressed_fp8("tensor", "tensor", dynamic=False),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
}
WRITTEN["int"]["config_groups"]["group_0"]["input_activations"] = {
    **{"num_bits": 8, "type": "int", "symmetric": True},
    **{"strategy": "tensor", "dynamic": False},
}


def module(weight, kind, scale):
    """The tensors of a map, and the weight that they stand for, both [out, in]."""
    steps = np.abs(weight).max(1, keepdims=True) / np.float32(LARGEST[kind])
    if kind == "int":
        codes = np.rint(weight / steps).astype(np.int8)
    else:
        steps = steps.max().reshape(1)
        codes = (weight / steps).astype(ml_dtypes.float8_e4m3fn)
    found = {"weight": codes, "weight_scale": steps, "input_scale": scale.reshape(1)}
    return found, codes.astype(np.float32) * steps


def rounded(x, kind, scale):
    scaled = x / scale
    if kind == "int":
        return torch.clamp(torch.round(scaled), -128, 127) * scale
    return torch.clamp(scaled, -448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale


def write(folder, kind, equal):
    """A checkpoint, and the model whose linear maps round their inputs.

    equal: whether maps of one input have one scale, so that they can be joined.
    """
    model, method = build("Llama", {}), kind
    kind = "int" if kind == "int" else "float"
    model.save_pretrained(folder)
    file, rng = folder / "model.safetensors", np.random.default_rng(1)
    tensors = safetensors.numpy.load_file(file)
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        # Some activations are beyond the range, as in a file that was calibrated on another text.
        peak = 2.0 if equal else rng.uniform(1.5, 2.5)
        scale = np.float32(peak / LARGEST[kind])
        found, weight = module(linear.weight.detach().numpy(), kind, scale)
        if method == "modelopt":
            found |= {suffix: found[suffix].reshape(()) for suffix in ("weight_scale",)}
            found["input_scale"] = scale
        replace_module(tensors, name, {key: np.asarray(array) for key, array in found.items()})
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
        linear.register_forward_pre_hook(
            lambda _, inputs, scale=float(scale): rounded(inputs[0], kind, scale)
        )
    safetensors.numpy.save_file(tensors, file)
    edit_config(folder, quantization_config=WRITTEN[method])
    return model


def require_close(found, expected):
    """Equal but for positions behind an activation between two codes, which either may get."""
    errors = abs(np.asarray(found) - expected)
    assert abs(expected).max() > 1
    assert np.quantile(errors, 0.75) < 3e-5
    assert errors.max() < 0.1


@pytest.mark.parametrize(
    ("kind", "equal"),
    [
        *(("int", True), in_sweep("int", False), ("float", False), in_sweep("float", True)),
        in_sweep("modelopt", True),
    ],
)
def test_logits(kind, equal, tmp_path):
    model = write(tmp_path / "file", kind, equal)
    expected = reference_logits(model, TOKENS)
    lm = mpjax.load(tmp_path / "file", dtype="float32")
    assert lm.precision == ("W8A8KV16" if kind == "int" else "WFP8AFP8KV16")
    contents = look(open_headers(tmp_path / "file")).contents
    assert contents.endswith(", with static scales of activations")
    assert len(lm.model.layers[0].attention.qkv.parts) == (1 if equal else 3)
    require_close(lm.model(TOKENS.astype(np.int32)), expected)
    for linear in model.modules():
        linear._forward_pre_hooks.clear()
    assert abs(expected - reference_logits(model, TOKENS)).mean() > 0.01  # rounding shows
    if equal and kind != "modelopt":
        mpjax.save(lm, tmp_path / "saved")
        again = mpjax.load(tmp_path / "saved")
        require_same_bits(again, lm)
        assert again.model.layers[0].mlp.down.kernel.get_value().activation_scale is not None
        mpjax.export(lm, tmp_path / "exported")
        require_same_bits(mpjax.load(tmp_path / "exported", dtype="float32"), lm)


@pytest.mark.filterwarnings("ignore:scales in float32 are rounded")
def test_the_activations_of_experts_have_a_scale_for_each_token(tmp_path):
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    model = build("Qwen3Moe", sizes | {"head_dim": 16, "num_hidden_layers": 1})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for name in [name.removesuffix(".weight") for name in tensors if "_proj.weight" in name]:
        found, _ = module(tensors[f"{name}.weight"], "int", np.float32(0.1))
        replace_module(tensors, name, found)
    safetensors.numpy.save_file(tensors, file)
    edit_config(tmp_path, quantization_config=WRITTEN["int"])
    with pytest.warns(UserWarning, match="static scales for the activations of experts, which ar"):
        model = mpjax.load(tmp_path).model
    for place in model.linear_places(model.config):
        for kernel in place.kernels(model):
            assert (kernel.activation_scale is None) == ("experts" in place.path)
    logits = model(TOKENS.astype(np.int32))
    assert np.isfinite(np.asarray(logits, np.float32)).all()
    mpjax.load(tmp_path, precision="W8gKA16KV16")  # no warning of activations in 16 bits


@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_rounds_alike(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    write(tmp_path, kind, equal=False)
    expected = reference_logits(as_transformers_reads(tmp_path), TOKENS)
    lm = mpjax.load(tmp_path, dtype="float32")
    require_close(lm.model(TOKENS.astype(np.int32)), expected)
