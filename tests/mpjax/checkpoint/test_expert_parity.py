"""Mixtures of experts against transformers, on randomly initialised models in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.checkpoint.huggingface import decoder_config, open_headers, read_config
from mpjax.checkpoint.outlook import look
from mpjax.kernels import QuantizedTensor
from mpjax.loading import load
from mpjax.models import ExpertPlace, family
from tests.mpjax.checkpoint import test_huggingface_parity as parity
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import (
    FP8,
    pack_module_fp8,
    replace_module,
    round_to_nearest,
)
from tests.pallas_kernels.oracles import E2M1
from tests.sweeps import in_sweep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODELS: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 3, "sliding_window": 8}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            **parity.TWO_LAYERS,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            **parity.TWO_LAYERS,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}


def build(name):
    """A model; of gpt-oss, with strong gates, so that they are clamped, biases and sinks."""
    model = parity.build(*MODELS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if name == "gpt-oss" and "gate_up_proj" in parameter_name:
                parameter.normal_(0, 1)
            elif name == "gpt-oss" and parameter_name.endswith(("_bias", "sinks")):
                parameter.normal_(0, 0.5)
    return model


@pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")
@pytest.mark.parametrize("name", MODELS)
def test_plain_checkpoints(name, tmp_path, request):
    model = build(name)
    model.save_pretrained(tmp_path / "plain")
    loaded, prompt = parity.compare_logits(model, tmp_path / "plain", request)
    if name in ("qwen3-moe", "gpt-oss"):
        parity.require_greedy_tokens(model, loaded, prompt, 8)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
GPTQ |= {"checkpoint_format": "gptq_v2"}
PACKED: dict[str, tuple[dict, str | None]] = {
    "awq": (AWQ, None),
    "gptq-act-order": (GPTQ, None),
    "fp8": (FP8, "WFP8A16KV16"),
}


def maps_of(model, folder):
    """The name of each linear map in the file, and its weight [in, out] that may be written to."""
    _, config = decoder_config(folder, read_config(folder))
    weights = dict(model.named_parameters())
    for place in family(read_config(folder)).linear_places(config):
        if not isinstance(place, ExpertPlace):
            for name in place.names:
                yield name, weights[f"{name}.weight"].data.T
            continue
        layer, _, half = place.path.removesuffix(".gate_up").removesuffix(".down").rpartition(".")
        stack = weights[f"model.{layer}.{half}.{'gate_up' if 'up' in place.path else 'down'}_proj"]
        each = len(place.names) // place.experts
        for number, name in enumerate(place.names):
            yield name, stack.data[number // each].chunk(each)[number % each].T


@pytest.mark.parametrize("name", [in_sweep("awq"), "gptq-act-order", "fp8"])
def test_experts_that_are_quantised_one_by_one(name, tmp_path, request):
    # The reference gets the dequantised weights, which float32 holds exactly.
    model = parity.build(*MODELS["qwen3-moe"])
    (written, precision), rng = PACKED[name], np.random.default_rng(1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    orders: dict[int, np.ndarray] = {}
    for module, weight in maps_of(model, tmp_path):
        if written is FP8:
            values = pack_module_fp8(tensors, written, module)
        else:
            dense, channels = weight.numpy(), weight.shape[0]
            g_idx = np.arange(channels) // 32
            if written is GPTQ:  # one order for maps that read the same channels
                g_idx = orders.setdefault(channels, rng.permutation(g_idx))
            order = np.argsort(g_idx, kind="stable")
            codes, scales, zeros = round_to_nearest(dense[order], 32, 4, False)
            codes = codes[np.argsort(order)]
            packed = (
                pack_awq(codes, scales, zeros)
                if written is AWQ
                else pack_gptq(codes, scales, zeros, g_idx, 4, 2)
            )
            replace_module(tensors, module, packed)
            values = (codes.astype(np.float32) - zeros[g_idx]) * scales[g_idx].astype(np.float32)
        weight.copy_(torch.from_numpy(values))
    safetensors.numpy.save_file(tensors, file)
    parity.edit_config(tmp_path, quantization_config=written)
    loaded, _ = parity.compare_logits(model, tmp_path, request, precision)
    assert all(
        isinstance(kernel, QuantizedTensor)
        for place in loaded.linear_places(loaded.config)
        for kernel in place.kernels(loaded)
    )


def test_mxfp4_as_gpt_oss_is_published(tmp_path, request):
    model, rng = build("gpt-oss"), np.random.default_rng(1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, channels, outputs = parameter.shape
        codes = rng.integers(0, 16, (experts, outputs, channels // 32, 32)).astype(np.uint8)
        scales = rng.integers(122, 125, codes.shape[:3]).astype(np.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        values = E2M1[codes] * 2.0 ** (scales.astype(float) - 127)[..., None]
        values = values.reshape(experts, outputs, channels).transpose(0, 2, 1)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    safetensors.numpy.save_file(tensors, file)
    parity.edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    loaded, _ = parity.compare_logits(model, tmp_path, request)
    found = look(open_headers(tmp_path))
    assert (found.contents, found.others) == ("MXFP4, codes kept as WMXFP4", {})
    lm = load(tmp_path, dtype="float32")
    counts = lm.summary()["linear_maps"]
    assert counts["mlp.experts.gate_up"] == counts["mlp.experts.down"] == {"WMXFP4": 2}
    assert lm.precision == "W32+WMXFP4A32KV16"
    place = next(p for p in loaded.linear_places(loaded.config) if p.path.endswith("gate_up"))
    mpjax.export(lm, tmp_path / "exported")
    written = safetensors.numpy.load_file(tmp_path / "exported" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor)
    with pytest.raises(ValueError, match="format 'awq' holds no experts that share one tensor"):
        mpjax.export(lm, tmp_path / "other", format="awq")
    mpjax.export(lm, tmp_path / "plain", format="plain")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, read.get_parameter(name)), name
    again = place.join(place.maps(loaded))[0].kernel.get_value()
    [kernel] = place.kernels(loaded)
    np.testing.assert_array_equal(again.words, kernel.words)


def test_quantised_while_loading_saved_and_restored(tmp_path):
    model = parity.build(*MODELS["qwen2-moe"])
    model.save_pretrained(tmp_path / "plain")
    tokens = np.arange(40, dtype=np.int32)[None]
    lm = load(tmp_path / "plain", precision="W8g32A16KV16", dtype="float32")
    found = lm.model(tokens)
    expected = parity.reference_logits(model, tokens)
    assert 1e-4 < np.abs(found - expected).mean() / np.abs(expected).mean() < 0.05
    counts = lm.summary()["linear_maps"]
    assert counts["mlp.experts.gate_up"] == counts["mlp.shared.down"] == {"W8g32": 1}
    assert lm.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.model(tokens), found)


LEFT_OUT = {
    "pack-quantized": lambda said: said["ignore"],
    "awq": lambda said: said["modules_to_not_convert"],
    "gptq_v2": lambda said: [rule.strip("-:^$").replace("\\", "") for rule in said["dynamic"]],
}


@pytest.mark.parametrize(
    "layout", [layout if layout == "awq" else in_sweep(layout) for layout in LEFT_OUT]
)
def test_exports_of_experts_one_by_one(layout, tmp_path):
    """Bits stay, and readers that pack all linear maps are told to leave routers out."""
    name, sizes = MODELS["qwen2-moe"]
    parity.build(name, sizes | {"num_experts": 4}).save_pretrained(tmp_path / "plain")
    lm = load(tmp_path / "plain", precision="W4g32A16KV16")
    mpjax.export(lm, tmp_path / layout, format=layout)
    require_same_bits(load(tmp_path / layout), lm)
    written = json.loads((tmp_path / layout / "config.json").read_text())
    mlp = "model.layers.1.mlp"
    expected = ["lm_head", f"{mlp}.gate", f"{mlp}.shared_expert_gate"]
    assert LEFT_OUT[layout](written["quantization_config"]) == expected
    with pytest.raises(ValueError, match="format 'mxfp4' holds only experts that share one tensor"):
        mpjax.export(lm, tmp_path / "other", format="mxfp4")
