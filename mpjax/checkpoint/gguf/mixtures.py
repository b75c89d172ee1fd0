"""Mixtures of experts in GGUF files: splitting into experts, and keys.

A file has one fused tensor for all experts, `ffn_gate_exps` [experts, rows, columns]; older files
have one for each, `ffn_gate.3`. Source: llama.cpp, gguf-py/gguf/constants.py, convert_hf_to_gguf.py
and src/llama-graph.cpp.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpjax.checkpoint.fused_experts import MOST_EXPERTS
from mpjax.checkpoint.gguf import hybrids
from mpjax.checkpoint.gguf.dense import biases, granite, partial_rotation, qwen_text, windows
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

MAVERICK_EXPERTS = 128  # of Llama 4 Maverick, which has no QK-norm
# GGUF's tensor of a router's selection biases.
CORRECTION = "exp_probs_b.bias"


def correction(name: str) -> dict[str, str]:
    """`Architecture.arrays` of a router with selection biases. name: Hugging Face's."""
    return {CORRECTION: name}


# Least bytes of an expert's map, and numbers of its biases, so that names of experts never take
# more memory than the file.
LEAST_BYTES, LEAST_BIASES = 1024, 16
# Also maps of streams (Gemma 3n).
_OF_ALL = re.compile(r"(blk\.\d+\.ffn_\w+_exps|altup_(?:unembd_)?proj)\.(\w+)")
_OF_ONE = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.(\w+)")
_GATE_UP = "ffn_gate_up_exps"  # fused: each expert's gate, then its up
_VECTOR = "ffn_gate_inp_shexp.weight"  # a matrix with one row in Hugging Face's files


def split_experts(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Splits fused tensors into one for each expert, such as `blk.0.ffn_gate_exps.3.weight`.

    path: of the file. Raises CheckpointError if two tensors hold the same map of an expert.
    """
    found: dict[str, Tensor] = {}
    for written, tensor in tensors.items():
        for own in _split(written, tensor):
            if own.name in found:
                raise CheckpointError(
                    f"{path}: {written} is the second tensor for {own.name}: expected either one "
                    "tensor for all experts of a layer or one for each"
                )
            found[own.name] = own
    return found


def _split(name: str, tensor: Tensor) -> Iterator[Tensor]:
    if (all_of := _OF_ALL.fullmatch(name)) and _is_stack(tensor):
        count, *shape = tensor.shape
        parts = [all_of[1]]
        if all_of[1].endswith(_GATE_UP) and shape[0] % 2 == 0:
            parts = [all_of[1].replace("gate_up", half) for half in ("gate", "up")]
            shape[0] //= 2
        size, begin = (tensor.end - tensor.begin) // count // len(parts), tensor.begin
        for index, part in itertools.product(range(count), parts):
            own, end = f"{part}.{index}.{all_of[2]}", begin + size
            yield tensor._replace(name=own, shape=tuple(shape), begin=begin, end=end)
            begin = end
    elif all_of is not None and _is_list_of_biases(tensor):
        size = (tensor.end - tensor.begin) // tensor.shape[0]
        for index in range(tensor.shape[0]):
            begin = tensor.begin + index * size
            own = f"{all_of[1]}.{index}.{all_of[2]}"
            yield tensor._replace(name=own, shape=tensor.shape[1:], begin=begin, end=begin + size)
    elif one := _OF_ONE.fullmatch(name):
        yield tensor._replace(name=f"{one[1]}_exps.{one[2]}.{one[3]}")
    elif name.endswith(_VECTOR) and len(tensor.shape) == 1:
        yield tensor._replace(shape=(1, *tensor.shape))
    elif tensor.type.dtype is not None:
        yield tensor._replace(shape=hybrids.shape(name, tensor.shape))
    else:
        yield tensor


def _is_stack(tensor: Tensor) -> bool:
    """Whether a tensor is a stack of up to MOST_EXPERTS matrices of LEAST_BYTES or more."""
    if len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MOST_EXPERTS:
        return False
    return tensor.end - tensor.begin >= tensor.shape[0] * LEAST_BYTES


def _is_list_of_biases(tensor: Tensor) -> bool:
    """Whether a tensor has a row of biases for each of up to MOST_EXPERTS experts."""
    if len(tensor.shape) != 2 or not tensor.name.endswith(".bias") or tensor.type.dtype is None:
        return False
    return 0 < tensor.shape[0] <= MOST_EXPERTS and tensor.shape[1] >= LEAST_BIASES


def mixtral_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Mixtral's config.json."""
    return {
        "num_local_experts": metadata.whole("llama.expert_count"),
        "num_experts_per_tok": metadata.whole("llama.expert_used_count"),
    }


def phi_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of PhiMoE's config.json; the jitter of its router is the published model's."""
    return {
        "num_local_experts": metadata.whole("phimoe.expert_count"),
        "num_experts_per_tok": metadata.whole("phimoe.expert_used_count"),
        "sliding_window": metadata.whole("phimoe.attention.sliding_window", 0) or None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "lm_head_bias": "output.bias" in tensors,
    }


def qwen_text_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of the text model of Qwen3-VL's mixtures."""
    return qwen_text(metadata, tensors) | qwen_keys(metadata, tensors)


SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of scores


def require_scores(metadata: Metadata, expected: int, default: int = 0) -> None:
    """Raises CheckpointError unless the router has these scores. default: if files name none."""
    name = metadata.text("general.architecture")
    key = f"{name}.expert_gating_func"
    if (found := metadata.whole(key, 0) or default) != expected:
        shown = "the softmax" if expected == SOFTMAX else "the sigmoid"
        raise CheckpointError(f"{metadata.path}: {key} is {found}: expected {expected}, {shown}")


def grouped_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of routers like DeepSeek's, whose first layers have no experts.

    0 stands for 1 in the numbers of groups and in the factor of the experts' sum.
    """
    name = metadata.text("general.architecture")
    counts = {
        **{"n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    groups = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {
        **{key: metadata.whole(f"{name}.{written}") for key, written in counts.items()},
        **{key: metadata.whole(f"{name}.{written}", 0) or 1 for key, written in groups.items()},
        "n_shared_experts": metadata.whole(f"{name}.expert_shared_count", 0),
        "first_k_dense_replace": metadata.whole(f"{name}.leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number(f"{name}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.flag(f"{name}.expert_weights_norm", False),
    }


def glm_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of GLM-4.5 and later mixtures."""
    require_scores(metadata, SIGMOID, SIGMOID)
    metadata.numbers("glm4moe.rope.dimension_sections", None)  # which matter only for images
    return {
        **grouped_keys(metadata, tensors),
        **partial_rotation(metadata),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


def dots_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of dots.llm1, which has no windows in llama.cpp."""
    require_scores(metadata, SIGMOID)
    bias = "blk.0.attn_q.bias" in tensors
    return grouped_keys(metadata, tensors) | {"sliding_window": None, "attention_bias": bias}


def ernie_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of ERNIE 4.5's mixtures."""
    name = "ernie4_5-moe"
    return {
        "moe_num_experts": metadata.whole(f"{name}.expert_count"),
        "moe_k": metadata.whole(f"{name}.expert_used_count"),
        "moe_intermediate_size": metadata.whole(f"{name}.expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.whole(f"{name}.expert_shared_count", 0),
        "moe_layer_start_index": metadata.whole(f"{name}.leading_dense_block_count", 0),
        "moe_layer_interval": metadata.whole(f"{name}.interleave_moe_layer_step"),
        "use_bias": "blk.0.attn_q.bias" in tensors,
    }


def hunyuan_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Hunyuan's mixtures, which have one shared expert."""
    name = "hunyuan-moe"
    if (shared := metadata.whole(f"{name}.expert_shared_count", 1)) != 1:
        raise CheckpointError(
            f"{metadata.path}: {name}.expert_shared_count is {shared}: expected 1"
        )
    return biases(metadata, tensors) | {
        "num_experts": metadata.whole(f"{name}.expert_count"),
        "moe_topk": metadata.whole(f"{name}.expert_used_count"),
    }


def granite_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Granite 3's mixtures, some of which have a shared expert."""
    name = "granitemoe"
    shared = metadata.whole(f"{name}.expert_shared_feed_forward_length", 0)
    found = granite(metadata, tensors) | {
        "num_local_experts": metadata.whole(f"{name}.expert_count"),
        "num_experts_per_tok": metadata.whole(f"{name}.expert_used_count"),
    }
    if not shared:
        return found
    kind = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    return found | kind | {"shared_intermediate_size": shared}


def gpt_oss_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of gpt-oss' config.json."""
    return windows(metadata, 2) | {
        "num_local_experts": metadata.whole("gpt-oss.expert_count"),
        "num_experts_per_tok": metadata.whole("gpt-oss.expert_used_count"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        # Its default is YaRN; a file's scaling is in rope_scaling.
        "rope_parameters": {"rope_type": "default"},
    }


def llama4_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Llama 4's text model; some are constants in llama.cpp.

    A window of 0 stands for no chunks, and RoPE in all layers.
    """
    count = metadata.whole("llama4.expert_count")
    has_chunks = metadata.whole("llama4.attention.sliding_window", 1) != 0
    return {
        "intermediate_size": metadata.whole("llama4.expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.whole("llama4.feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": metadata.whole("llama4.expert_used_count"),
        "interleave_moe_layer_step": metadata.whole("llama4.interleave_moe_layer_step"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": count != MAVERICK_EXPERTS,
        "attention_chunk_size": 8192 if has_chunks else None,
        "attn_temperature_tuning": has_chunks,
        **{"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4},
        "no_rope_layers": None if has_chunks else [1] * metadata.whole("llama4.block_count"),
    }


def minimax_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of MiniMax M2."""
    require_scores(metadata, SIGMOID)
    return partial_rotation(metadata) | {
        "num_local_experts": metadata.whole("minimax-m2.expert_count"),
        "num_experts_per_tok": metadata.whole("minimax-m2.expert_used_count"),
    }


def qwen_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Qwen's mixtures.

    llama.cpp normalises the router weights of a token's experts, except for Qwen2-MoE.
    """
    name = metadata.text("general.architecture")
    key, is_divided = f"{name}.expert_weights_norm", name != "qwen2moe"
    if metadata.flag(key, is_divided) != is_divided:
        raise CheckpointError(
            f"{metadata.path}: {key} is {not is_divided}: expected {is_divided}, with which "
            "llama.cpp computes this architecture"
        )
    found = {
        "num_experts": metadata.whole(f"{name}.expert_count"),
        "num_experts_per_tok": metadata.whole(f"{name}.expert_used_count"),
        "moe_intermediate_size": metadata.whole(f"{name}.expert_feed_forward_length"),
        "norm_topk_prob": is_divided,
    }
    shared = metadata.whole(f"{name}.expert_shared_feed_forward_length", 0)
    return found | ({"shared_expert_intermediate_size": shared} if shared else {})
