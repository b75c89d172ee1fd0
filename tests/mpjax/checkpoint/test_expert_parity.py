"""Mixtures of experts against transformers, on randomly initialised models in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.huggingface import decoder_config, read_config
from mpjax.kernels import QuantizedTensor
from mpjax.loading import load
from mpjax.models import ExpertPlace, family
from tests.mpjax.checkpoint import test_huggingface_parity as parity
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq
from tests.mpjax.checkpoint.write_checkpoint import (
    FP8,
    pack_module_fp8,
    replace_module,
    round_to_nearest,
)

torch = pytest.importorskip("torch")

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


@pytest.mark.parametrize("name", MODELS)
def test_plain_checkpoints(name, tmp_path, request):
    model = parity.build(*MODELS[name])
    model.save_pretrained(tmp_path / "plain")
    loaded, prompt = parity.compare_logits(model, tmp_path / "plain", request)
    if name == "qwen3-moe":
        found = parity.generate(loaded, prompt.astype(np.int32), 8)
        greedy = model.generate(
            torch.from_numpy(prompt),
            attention_mask=torch.ones(*prompt.shape, dtype=torch.long),
            do_sample=False,
            max_new_tokens=8,
        )
        np.testing.assert_array_equal(found, greedy.numpy()[:, prompt.shape[1] :])


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


@pytest.mark.parametrize("name", PACKED)
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


def test_an_expert_that_is_missing_is_named(tmp_path):
    parity.build(*MODELS["mixtral"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(.*experts\.2\.w2\.weight\)"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 5}))
    with pytest.raises(CheckpointError, match=r"layers\[0\]\.mlp: 5 experts per token are more"):
        load(tmp_path)
