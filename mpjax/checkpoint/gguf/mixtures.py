"""Mixtures of experts in GGUF files: splitting into experts, names, and keys.

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
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

# GGUF's name → Hugging Face's, of the modules of an MoE layer.
QWEN_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{w}_exps": f"mlp.experts.{{expert}}.{w}_proj" for w in ("gate", "up", "down")},
    **{f"ffn_{w}_shexp": f"mlp.shared_expert.{w}_proj" for w in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{written}_exps": f"block_sparse_moe.experts.{{expert}}.{name}"
        for written, name in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
}
# Least bytes of an expert's map, so that names of experts never take more memory than the file.
LEAST_BYTES = 1024
_OF_ALL = re.compile(r"(blk\.\d+\.ffn_\w+_exps)\.(\w+)")
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


def mixtral_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Mixtral's config.json."""
    return {
        "num_local_experts": metadata.whole("llama.expert_count"),
        "num_experts_per_tok": metadata.whole("llama.expert_used_count"),
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
