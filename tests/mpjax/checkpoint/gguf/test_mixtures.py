"""Mixtures of experts; test_parity.py compares those of Qwen with transformers' reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.gguf.blocks import TYPES
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.mixtures import split_experts
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.gguf.write_gguf import (
    EXPERTS,
    MIXED,
    SIZES,
    gguf,
    llama_metadata,
    random_tensors,
    with_experts,
)
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import write_checkpoint

FILE = Path("m.gguf")
HEADS = {"attn_q": SIZES["heads"], "attn_k": SIZES["kv_heads"]}
NAMES = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{"attn_output": "self_attn.o_proj", "ffn_gate_inp": "block_sparse_moe.gate"},
}
OF_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


def mixtral(rng):
    metadata = llama_metadata()
    tensors = random_tensors(dict.fromkeys(("token_embd", *MIXED), "F16"), rng)
    with_experts(metadata, tensors, rng)
    return metadata, tensors


def hugging_face(tensors):
    """Mixtral's tensors by Hugging Face's names; rows of queries and keys are put back."""
    found = {}
    for name, (kind, shape, content) in tensors.items():
        array = np.frombuffer(content, np.float16 if kind == "F16" else np.float32).reshape(shape)
        if not name.startswith("blk."):
            top = {"token_embd": "embed_tokens", "output_norm": "norm"}[name.split(".")[0]]
            found[f"model.{top}.weight"] = array
            continue
        _, layer, module, _ = name.split(".")
        if (heads := HEADS.get(module)) is not None:
            pairs = array.reshape(heads, -1, 2, shape[1])
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)
        if module in OF_EXPERTS:
            block = f"model.layers.{layer}.block_sparse_moe.experts"
            for expert, matrix in enumerate(array):
                found[f"{block}.{expert}.{OF_EXPERTS[module]}.weight"] = matrix
        else:
            found[f"model.layers.{layer}.{NAMES[module]}.weight"] = array
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_a_mixtral_is_the_checkpoint_that_it_was_made_of(apart, tmp_path, rng):
    """Also where a file has a tensor for each expert, as older ones have."""
    metadata, tensors = mixtral(rng)
    config = {"torch_dtype": "float16"}
    expected = hugging_face(tensors)
    if apart:
        for name in [name for name in tensors if "_exps" in name]:
            kind, (count, *shape), content = tensors.pop(name)
            size = len(content) // count
            for expert in range(count):
                own = name.replace("_exps.", f".{expert}.")
                part = content[expert * size : (expert + 1) * size]
                tensors[own] = kind, tuple(shape), part
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(metadata, tensors))
    config = GGUFSource(path).read_config() | config
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (EXPERTS, 2)
    found = mpjax.load(path)
    require_same_bits(found, mpjax.load(write_checkpoint(tmp_path / "hf", config, expected)))


def test_codes_of_experts_are_kept(tmp_path, rng):
    metadata = llama_metadata()
    tensors = random_tensors(dict.fromkeys(MIXED, "F16"), rng)
    with_experts(metadata, tensors, rng, kind="Q8_0")
    (tmp_path / "m.gguf").write_bytes(gguf(metadata, tensors))
    lm = mpjax.load(tmp_path / "m.gguf")
    maps = lm.summary()["linear_maps"]
    assert maps["mlp.experts.gate_up"] == maps["mlp.experts.down"] == {"W8g32sym": 2}
    _, shape, content = tensors["blk.1.ffn_down_exps.weight"]
    blocks = np.frombuffer(content, np.uint8).reshape(*shape[:2], -1, 34)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    weight = (blocks[..., 2:].view(np.int8) * scales).reshape(shape)
    kernel = lm.model.layers[1].mlp.experts.down.kernel.get_value()
    np.testing.assert_array_equal(kernel.dequantize(), weight.swapaxes(1, 2))


def stack(*shape, name="blk.0.ffn_up_exps.weight"):
    return {name: Tensor(name, TYPES[0], shape, 100, 100 + 4 * int(np.prod(shape)))}


def test_experts_are_runs_of_bytes():
    found = split_experts(stack(3, 16, 32), FILE)
    assert [*found] == [f"blk.0.ffn_up_exps.{expert}.weight" for expert in range(3)]
    assert [(t.shape, t.begin, t.end) for t in found.values()] == [
        ((16, 32), 100 + 2048 * expert, 2148 + 2048 * expert) for expert in range(3)
    ]
    gate = split_experts(stack(8, name="blk.0.ffn_gate_inp_shexp.weight"), FILE)
    assert [tensor.shape for tensor in gate.values()] == [(1, 8)]


@pytest.mark.parametrize(
    "shape", [(64, 64), (0, 64, 64), (4097, 16, 16), (4096, 0, 64), (4, 15, 16)]
)
def test_what_is_no_stack_of_experts_stays(shape):
    assert split_experts(stack(*shape), FILE) == stack(*shape)


@pytest.mark.parametrize("is_first", [False, True])
def test_an_expert_has_one_tensor(is_first):
    one = stack(16, 32, name="blk.0.ffn_up.2.weight")
    both = one | stack(3, 16, 32) if is_first else stack(3, 16, 32) | one
    with pytest.raises(CheckpointError, match=r"^m\.gguf: .* second tensor for .*up_exps\.2\.wei"):
        split_experts(both, FILE)
    assert len(split_experts(stack(2, 16, 32) | one, FILE)) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, t: m.update({"llama.expert_count": 5}), "lacks|the model expects"),
        (lambda m, t: m.pop("llama.expert_used_count"), "has no 'llama.expert_used_count'"),
        (lambda m, t: t.pop("blk.1.ffn_up_exps.weight"), "lacks 4 tensors|has no tensor"),
        (
            lambda m, t: t.update({"blk.1.ffn_up_exps.weight": ("F16", (64, 64), bytes(8192))}),
            r"lacks 4 tensors|has no tensor|\(blk\.1\.ffn_up_exps\.weight\)",
        ),
        (
            lambda m, t: m.update({"general.architecture": "gemma", "gemma.expert_count": 4}),
            "'gemma' with experts: expected one of .*with experts llama, qwen2moe, qwen3moe",
        ),
    ],
)
def test_files_that_are_refused(change, said, tmp_path, rng):
    metadata, tensors = mixtral(rng)
    change(metadata, tensors)
    (tmp_path / "m.gguf").write_bytes(gguf(metadata, tensors))
    with pytest.raises(CheckpointError, match=said):
        mpjax.load(tmp_path / "m.gguf")
