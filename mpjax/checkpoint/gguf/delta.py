"""Gated DeltaNet in GGUF files: Qwen3-Next, and Qwen3.5, 3.6 and 3.8.

Source: llama.cpp, gguf-py/gguf/constants.py, and its conversion of Hugging Face's files. Files of
Qwen3.5 reorder value heads: the first one of every key head, then all second ones. Files of
Qwen3-Next keep Hugging Face's order, with one map for queries, keys and values, one for gates, and
one for rates and decays, interleaved by key head. They are read like Qwen3.5's after splitting the
last map.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.mixtures import qwen_keys
from mpjax.checkpoint.gguf.names import QWEN_EXPERTS
from mpjax.errors import CheckpointError

Change = Callable[[np.ndarray], np.ndarray]
_MIXER = "linear_attn"
# GGUF's module name, without `blk.<layer>.` → Hugging Face's.
_ATTENTION: Mapping[str, str] = {
    **{f"attn_{which}": f"self_attn.{which}_proj" for which in "qkv"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"},
    "post_attention_norm": "post_attention_layernorm",
    **{"attn_qkv": f"{_MIXER}.in_proj_qkv", "attn_gate": f"{_MIXER}.in_proj_z"},
    **{"ssm_beta": f"{_MIXER}.in_proj_b", "ssm_alpha": f"{_MIXER}.in_proj_a"},
    **{"ssm_conv1d": f"{_MIXER}.conv1d", "ssm_norm": f"{_MIXER}.norm"},
    "ssm_out": f"{_MIXER}.out_proj",
}
DENSE_NAMES: Mapping[str, str] = {
    **_ATTENTION,
    **{f"ffn_{which}": f"mlp.{which}_proj" for which in ("gate", "up", "down")},
}
EXPERT_NAMES: Mapping[str, str] = {**_ATTENTION, **QWEN_EXPERTS}
# GGUF's tensor name → Hugging Face's, for tensors without `.weight`.
ARRAYS: Mapping[str, str] = {"ssm_a": f"{_MIXER}.A_log", "ssm_dt.bias": f"{_MIXER}.dt_bias"}
# The modules of a multi-token prediction layer beside those of a layer, in files of the same kind.
DRAFT_NAMES: Mapping[str, str] = {
    **{"nextn.eh_proj": "mtp.fc", "nextn.shared_head_norm": "mtp.norm"},
    **{"nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden"},
}
DRAFT_JOINT = "draft.0.nextn.eh_proj"  # an array in Hugging Face's files, in 16 bits
_JOINT = re.compile(r"(blk\.\d+)\.ssm_ba\.(\w+)")
_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Heads(NamedTuple):
    """The numbers of key and value heads of linear attention layers, and their head dimensions."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        """The numbers that a config.json has."""
        kinds = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        return cls(*(config[f"linear_{kind}"] for kind in kinds))

    def grouped(self, rows: Any, size: int) -> Any:
        """Reorders parts of `size` rows per value head from GGUF's to Hugging Face's order.

        rows: returned unchanged if the number of rows is wrong, which `make_plan` refuses.
        """
        if rows.shape[0] != self.values * size:
            return rows
        parts = rows.reshape(self.values // self.keys, self.keys, size, *rows.shape[1:])
        return parts.swapaxes(0, 1).reshape(rows.shape)

    def behind_keys(self, rows: np.ndarray) -> np.ndarray:
        """Rows of queries, keys and values, with the values in Hugging Face's order."""
        begin = 2 * self.keys * self.key_dim
        values = self.grouped(rows[begin:], self.value_dim)
        return np.concatenate([rows[:begin], values])

    def half(self, rows: np.ndarray, number: int) -> np.ndarray:
        """The rates (number 0) or decays (1) of rows that interleave both by key head."""
        parts = rows.reshape(self.keys, 2, -1, *rows.shape[1:])
        return parts[:, number].reshape(-1, *rows.shape[1:])


def change(kind: str, config: Mapping[str, Any]) -> Change | None:
    """The reordering of a Qwen3.5 tensor's rows to Hugging Face's order; None if it is equal.

    kind: the tensor's name without `blk.<layer>.`.
    """
    heads = Heads.of(config)
    if heads.keys == heads.values:
        return None
    if kind in ("attn_qkv", "ssm_conv1d"):
        return heads.behind_keys
    if kind == "ssm_out":  # GGUFReader decodes the blocks first, since a block spans several heads
        return lambda rows: heads.grouped(rows.T, heads.value_dim).T if rows.ndim == 2 else rows
    sizes = {"attn_gate": heads.value_dim, **dict.fromkeys(("ssm_beta", "ssm_alpha"), 1)}
    sizes |= dict.fromkeys(("ssm_a", "ssm_dt.bias"), 1)
    if (size := sizes.get(kind)) is None:
        return None
    return lambda rows: heads.grouped(rows, size)


def read_layers(
    metadata: Metadata, tensors: Mapping[str, Tensor], *, drafts: bool
) -> dict[str, Tensor]:
    """The tensors, with those of multi-token prediction layers as `draft.<layer>` or left out.

    drafts: whether they are wanted. These layers come last, and block_count counts them.
    A joint tensor of rates and decays becomes two tensors of the same bytes; see `Heads.half`.
    Raises CheckpointError for wanted layers with an embedding or a head of their own.
    """
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.nextn_predict_layers", 0)
    layers = metadata.whole(f"{name}.block_count") - count
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _OF_LAYER.fullmatch(key)
        if match is not None and int(match[1]) >= layers and count:
            if drafts and match[2].startswith(("nextn.embed_tokens", "nextn.shared_head_head")):
                raise CheckpointError(
                    f"{metadata.path}: {key} is a table of the multi-token-prediction head alone: "
                    "expected a head that uses the model's; load it without mtp"
                )
            if drafts:
                written = f"draft.{int(match[1]) - layers}.{match[2]}"
                found[written] = tensor._replace(name=written)
        elif (joint := _JOINT.fullmatch(key)) and tensor.shape and tensor.shape[0] % 2 == 0:
            for own in ("ssm_beta", "ssm_alpha"):
                written = f"{joint[1]}.{own}.{joint[2]}"
                found[written] = tensor._replace(name=written)
        else:
            found[key] = tensor
    return found


def keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Qwen3.5's config.json, also for Qwen3-Next. Raises CheckpointError."""
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.block_count")
    names = ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
    groups, values, state, inner, width = (metadata.whole(f"{name}.ssm.{key}") for key in names)
    if groups < 1 or values < 1 or values % groups or inner % values:
        raise CheckpointError(
            f"{metadata.path}: {name}.ssm has {groups} key heads, {values} value heads and {inner} "
            "channels of these: expected each to be a multiple of the one before"
        )
    rotated, whole = (
        metadata.whole(f"{name}.{key}") for key in ("rope.dimension_count", "attention.key_length")
    )
    found: dict[str, Any] = {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": values,
        "linear_key_head_dim": state,
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": width,
        "full_attention_interval": metadata.whole(f"{name}.full_attention_interval", 4),
        "partial_rotary_factor": rotated / max(whole, 1),
        "attention_bias": any(key.endswith("attn_q.bias") for key in tensors),
    }
    # Marked as known: mrope sections matter only for images.
    metadata.numbers(f"{name}.rope.dimension_sections", None)
    flags = metadata.numbers(f"{name}.attention.recurrent_layers", None)
    if flags is not None:
        kinds = ["linear_attention" if flag else "full_attention" for flag in flags[:count]]
        found["layer_types"] = kinds[: count - metadata.whole(f"{name}.nextn_predict_layers", 0)]
    return found


def expert_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of a model with experts."""
    return keys(metadata, tensors) | qwen_keys(metadata, tensors)
