"""Experts that the package compressed-tensors packs, as transformers and this library load them.

Files are as llm-compressor publishes mixtures: each expert has three Linears of its own, and
`ignore` names the router and the head, which stay plain.
"""

from __future__ import annotations

import pytest

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.kernels import QuantizedTensor
from mpjax.models import ExpertPlace
from tests.mpjax.checkpoint.write_checkpoint import compressed_fp8, compressed_integers
from tests.sweeps import in_sweep

# Asked for here, too: a module whose import was skipped once can't be imported again.
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from safetensors.torch import load_file, save_file

from tests.mpjax.checkpoint.test_expert_parity import MODELS as OTHERS
from tests.mpjax.checkpoint.test_huggingface_parity import (
    TWO_LAYERS,
    build,
    compare_logits,
    edit_config,
    torch,
    transformers,
)

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
match_name = pytest.importorskip("compressed_tensors.utils").match_name

COMMAND = {
    **{**TWO_LAYERS, "first_k_dense_replace": 1, "num_experts": 6, "num_experts_per_tok": 3},
    **{"num_shared_experts": 1, "layer_types": ["sliding_attention", "full_attention"]},
    **{"head_dim": 32, "sliding_window": 8, "logit_scale": 0.5},
}
MODELS = OTHERS | {"command-a-plus": ("Cohere2Moe", COMMAND)}
# Sizes, and what `ignore` names: routers, but not `mlp.gate_proj` of a dense layer, which the first
# has; and attention of the second.
MIXTURES = {
    "qwen3-moe": ({"mlp_only_layers": [0], **TWO_LAYERS}, ["lm_head", "re:.*mlp.gate$"]),
    "mixtral": ({}, ["lm_head", "re:.*block_sparse_moe.gate", "re:.*self_attn.*"]),
    "command-a-plus": ({}, ["lm_head", "re:.*mlp.gate$"]),
}
INTEGERS, FP8 = compressed_integers(), compressed_fp8("channel", "token")
# Experts in integers beside other maps in FP8, each in a group with a layout of its own.
MIXED = INTEGERS | {
    "format": "mixed-precision",
    "config_groups": {
        target: config["config_groups"]["group_0"]
        | {"targets": [target], "format": config["format"]}
        for target, config in ((r"re:.*(self_attn|mlp)\.\w+$", FP8), ("re:.*experts.*", INTEGERS))
    },
}
# The model, config.json's words, and a precision that leaves activations in 16 bits.
CASES = {
    "integers": ("qwen3-moe", INTEGERS, None),
    "fp8": ("qwen3-moe", FP8, "WFP8gKA16KV16"),
    "mixed": ("qwen3-moe", MIXED, "WFP8gK+W4g32A16KV16"),
    "mixtral": ("mixtral", INTEGERS, None),
    "command-a-plus": ("command-a-plus", INTEGERS, None),
}


def pack(module, weight, written):
    """The tensors of a Linear by suffix, as the package makes them of its weight [out, in]."""
    [group] = (
        group
        for group in written["config_groups"].values()
        if any(target == "Linear" or match_name(module, target) for target in group["targets"])
    )
    scheme = quantization.QuantizationScheme.model_validate(group)
    blocks = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
    largest = 448 if scheme.weights.type == "float" else 7
    # With four significant bits, so that bfloat16 holds products of scales and codes exactly.
    mantissas, exponents = torch.frexp(blocks.abs().amax(2) / largest)
    scales = torch.ldexp(torch.ceil(mantissas * 16) / 16, exponents).to(torch.bfloat16)
    layout = group.get("format") or written["format"]
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    return compressor.compress({"weight": weight, "weight_scale": scales}, scheme)


def write(folder, name, written, said=None, **sizes):
    """A checkpoint with all Linears packed but those that are ignored; returns its tensors.

    said: what config.json says in place of what is written.
    """
    (family, usual), (own, ignored) = MODELS[name], MIXTURES[name]
    build(family, usual | own | sizes).save_pretrained(folder)
    tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        is_plain = tensor.ndim == 1 or module == "model.embed_tokens"
        is_plain |= any(match_name(module, target) for target in ignored)
        packed = {"weight": tensor} if is_plain else pack(module, tensor, written)
        tensors |= {f"{module}.{suffix}": array for suffix, array in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=(said or written) | {"ignore": ignored})
    return tensors


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    "case", ["integers", "command-a-plus", *map(in_sweep, ("fp8", "mixed", "mixtral"))]
)
def test_logits(case, tmp_path, request):
    name, written, precision = CASES[case]
    write(tmp_path, name, written)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    # transformers leaves experts in the dtype of their scales.
    loaded, _ = compare_logits(reference.float().eval(), tmp_path, request, precision)
    for place in loaded.linear_places(loaded.config):
        are_packed = isinstance(place, ExpertPlace) or name != "mixtral"
        for kernel in place.kernels(loaded):
            assert isinstance(kernel, QuantizedTensor) == are_packed


@pytest.mark.parametrize(("written", "groups"), [(INTEGERS, 2), (FP8, 1)], ids=["integers", "fp8"])
def test_an_expert_without_its_scales_is_refused(written, groups, tmp_path):
    tensors = write(tmp_path, "qwen3-moe", written)
    module = "model.layers.1.mlp.experts.3.up_proj"
    del tensors[f"{module}.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = rf"{module} has no tensor weight_scale: expected .* \[32, {groups}\]"
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path)


def test_groups_of_another_size_are_refused(tmp_path):
    write(tmp_path, "mixtral", INTEGERS, compressed_integers(group_size=128), hidden_size=128)
    tensor = "model.layers.0.block_sparse_moe.experts.0.w1.weight_scale"
    message = rf"{tensor} is bfloat16 \[128, 4\]: expected .* \[128, 1\], by .*group_size 128 in"
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path)


def test_a_packed_router_that_is_ignored_is_refused(tmp_path):
    tensors = write(tmp_path, "qwen3-moe", INTEGERS)
    module = "model.layers.1.mlp.gate"
    packed = pack(module, tensors.pop(f"{module}.weight"), INTEGERS)
    tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    message = f"{module} has packed tensors, but by `ignore` in config.json it was left in 16 bits"
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path)
