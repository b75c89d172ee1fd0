"""Small random checkpoints in Hugging Face's form, for tests of any floor.

numpy and safetensors only; names and shapes are written out here from transformers' modelling
files, independently of the loader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.mpjax.checkpoint.packers import pack_awq, pack_fp8, pack_gptq

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_SCALING},
    "mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}
# All linear maps [64, 64], so that a test compiles each of its programs once.
SQUARE = {"num_key_value_heads": 4, "intermediate_size": 64}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def linear_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[input, output channels] of each linear map, by the module's full name."""
    hidden, inner, head = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    queries, keys = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    maps = dict(zip(QKV, [(hidden, queries), (hidden, keys), (hidden, keys)], strict=True))
    maps |= {"self_attn.o_proj": (queries, hidden)}
    maps |= {name: (hidden, inner) for name in GATE_UP} | {"mlp.down_proj": (inner, hidden)}
    layers = range(hf["num_hidden_layers"])
    return {f"model.layers.{i}.{name}": shape for i in layers for name, shape in maps.items()}


def random_tensors(hf: dict[str, Any], rng: np.random.Generator, dtype: Any = np.float32) -> dict:
    """All tensors of a plain checkpoint, by name; values that are exact in float16 and bfloat16."""

    def draw(*shape: int) -> np.ndarray:
        return (rng.integers(-127, 128, shape) / 128).astype(dtype)

    hidden, table = hf["hidden_size"], (hf["vocab_size"], hf["hidden_size"])
    tensors = {"model.embed_tokens.weight": draw(*table), "model.norm.weight": draw(hidden)}
    if not hf["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(*table)
    for i in range(hf["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = draw(hidden)
        if "Qwen3" in hf["architectures"][0]:
            for norm in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{norm}.weight"] = draw(hf["head_dim"])
    for name, (channels, outputs) in linear_shapes(hf).items():
        tensors[f"{name}.weight"] = draw(outputs, channels)
        if "Qwen2" in hf["architectures"][0] and name.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{name}.bias"] = draw(outputs)
    return tensors


def round_to_nearest(
    weight: np.ndarray, group_size: int, bits: int, symmetric: bool = False
) -> tuple[np.ndarray, ...]:
    """Codes [K, N], scales float16 [G, N] and zeros [G, N] of a weight [K, N]."""
    groups = weight.astype(np.float32).reshape(-1, group_size, weight.shape[1])
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = np.maximum((high - low) / (2**bits - 1), 1e-4).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, 2**bits - 1)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    codes = np.rint(groups / scales[:, None].astype(np.float32)) + zeros[:, None]
    codes = np.clip(codes, 0, 2**bits - 1).reshape(weight.shape)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)


def replace_module(tensors: dict, name: str, packed: dict[str, np.ndarray]) -> None:
    """Puts a packed module in the place of a plain one; its bias stays."""
    del tensors[f"{name}.weight"]
    tensors.update({f"{name}.{suffix}": array for suffix, array in packed.items()})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def hqq(**changes: Any) -> dict[str, Any]:
    """The `quantization_config` of an HQQ checkpoint with other settings of its weights."""
    weights = {"nbits": 4, "group_size": 32, "axis": 1, "channel_wise": True, "optimize": True}
    groups = {"weight_quant_params": weights | changes, "scale_quant_params": None}
    return {"quant_method": "hqq", "quant_config": groups, "skip_modules": ["lm_head"]}


HQQ = hqq()


def pack_random(
    tensors: dict, hf: dict[str, Any], name: str, rng: np.random.Generator, g_idx: Any = None
) -> np.ndarray:
    """Packs a module with random codes as hf["quantization_config"] says; returns its weight.

    The weight is float32 [K, N], exact. g_idx: the group of each channel, in order by default.
    """
    written = hf["quantization_config"]
    shapes = linear_shapes(hf) | {"lm_head": (hf["hidden_size"], hf["vocab_size"])}
    channels, outputs = shapes[name]
    bits, size = written["bits"], written["group_size"]
    size = channels if size == -1 else size
    codes = rng.integers(0, 2**bits, (channels, outputs), np.uint8)
    zeros = rng.integers(0, 2**bits, (channels // size, outputs), np.uint8)
    if written.get("sym"):
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.001, 0.01, zeros.shape).astype(np.float16)
    if g_idx is None:
        g_idx = np.arange(channels) // size
    if written["quant_method"] == "awq":
        packed = pack_awq(codes, scales, zeros)
    else:
        version = 2 if written.get("checkpoint_format") == "gptq_v2" else 1
        packed = pack_gptq(codes, scales, zeros, g_idx, bits, version)
    replace_module(tensors, name, packed)
    return (codes.astype(np.float32) - zeros[g_idx]) * scales[g_idx].astype(np.float32)


# Blocks of 128 input channels; keys and values fill half a block of output channels.
FP8_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.norm"],
}


# The kv_cache_scheme of llm-compressor's FP8 caches.
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


def compressed_fp8(strategy: str, activations: str | None, dynamic: bool = True) -> dict[str, Any]:
    """A quantization_config of llm-compressor; the strategies of weights and of activations."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "actorder": None}
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    inputs = common | {"strategy": activations, "dynamic": dynamic, "group_size": None}
    if activations == "group":
        inputs["group_size"] = 128
    weights = common | {"strategy": strategy, "dynamic": False, "group_size": None} | block
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None, "format": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if activations else "naive-quantized",
        "config_groups": {
            "group_0": group | {"input_activations": inputs if activations else None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def pack_module_fp8(tensors: dict, written: dict[str, Any], name: str) -> np.ndarray:
    """Rounds a module to what a quantization_config says; returns its weight, float32 [K, N]."""
    block, scales = (128, 128), "weight_scale_inv"
    if written["quant_method"] != "fp8":
        [group] = written["config_groups"].values()
        strategies = {"channel": (1, None), "tensor": (None, None), "block": block}
        block, scales = strategies[group["weights"]["strategy"]], "weight_scale"
    packed, values = pack_fp8(tensors[f"{name}.weight"].T.astype(np.float32), block, scales)
    replace_module(tensors, name, packed)
    return values


def write_checkpoint(folder: Path, hf: dict[str, Any], tensors: dict, shards: int = 1) -> Path:
    """Writes config.json and safetensors: one file, or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def compressed_integers(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """A quantization_config of llm-compressor for integers; weights: what differs from W4A16."""
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    usual |= {"dynamic": False, "actorder": None, "block_structure": None}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}
    if layout == "int-quantized":
        usual |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": usual | weights,
        "input_activations": inputs | {"dynamic": True} if layout == "int-quantized" else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
