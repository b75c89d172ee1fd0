"""GGUF names and keys of recurrent layers: short convolutions and Mamba2.

Source: llama.cpp, gguf-py/gguf/constants.py, and its conversion of Hugging Face's files, from which
the tensors differ so: per-head numbers have a trailing axis of 1, convolution weights lack the axis
of 1, rates are stored as −exp(A_log), and Falcon-H1's multipliers are folded into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf.dense import multipliers
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

_ATTENTION = {f"attn_{which}": f"self_attn.{which}_proj" for which in "qkv"}
# GGUF's module name, without `blk.<layer>.` → Hugging Face's.
LFM2_NAMES: Mapping[str, str] = {
    **_ATTENTION,
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
}
LFM2_MOE_NAMES: Mapping[str, str] = {
    **LFM2_NAMES,
    "ffn_gate_inp": "feed_forward.gate",
    **{
        f"ffn_{written}_exps": f"feed_forward.experts.{{expert}}.{name}"
        for written, name in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
}


def _mamba(block: str) -> dict[str, str]:
    names = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{written}": f"{block}.{name}" for written, name in names.items()}


FALCON_NAMES: Mapping[str, str] = {
    **_ATTENTION,
    **_mamba("mamba"),
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{which}": f"feed_forward.{which}_proj" for which in ("gate", "up", "down")},
}
NEMOTRON_NAMES: Mapping[str, str] = {
    **_mamba("mixer"),
    **{f"attn_{which}": f"mixer.{which}_proj" for which in "qkv"},
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}


_GRANITE: Mapping[str, str] = {
    **_ATTENTION,
    **_mamba("mamba"),
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
# Gate and up are one fused map in Hugging Face's files.
GRANITE_NAMES: Mapping[str, str] = {
    **_GRANITE,
    **dict.fromkeys(("ffn_gate", "ffn_up"), "shared_mlp.input_linear"),
    "ffn_down": "shared_mlp.output_linear",
}
_EXPERT = "block_sparse_moe.experts.{expert}"
GRANITE_MOE_NAMES: Mapping[str, str] = {
    **_GRANITE,
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), "shared_mlp.input_linear"),
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), f"{_EXPERT}.input_linear"),
    "ffn_down_exps": f"{_EXPERT}.output_linear",
}


def arrays(block: str, correction: str | None = None) -> dict[str, str]:
    """`Architecture.arrays` of Mamba2, without `blk.<layer>.` and the layer's prefix.

    block: Hugging Face's name of the Mamba2 module. correction: that of the router bias.
    """
    found = {"ssm_a": f"{block}.A_log", "ssm_d": f"{block}.D", "ssm_dt.bias": f"{block}.dt_bias"}
    return found | ({} if correction is None else {"exp_probs_b.bias": correction})


def shape(name: str, written: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor has in Hugging Face's files. name: GGUF's. written: GGUF's shape."""
    kind = name.split(".", 2)[-1]
    if kind in ("ssm_conv1d.weight", "shortconv.conv.weight") and len(written) == 2:
        return written[0], 1, written[1]
    if kind.startswith("ssm_conv1d_") and written:  # with other axes of size 1
        return int(np.prod(written[:-1])), 1, written[-1]
    if kind in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return (int(np.prod(written)),)
    return written


def log_rates(rates: np.ndarray) -> np.ndarray:
    """A_log from rates −exp(A_log). Raises CheckpointError unless all are below 0."""
    if not (rates < 0).all():
        raise CheckpointError("a number of ssm_a is not below 0, as −exp(A_log) is")
    return np.log(-rates)


def _by_layer(metadata: Metadata, key: str) -> list[int]:
    """The values of a key for each layer; the file may have one for all."""
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.block_count")
    found = metadata.each(f"{name}.{key}", count)
    return found if len(found) == count else found * count


def lfm2_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of LFM2."""
    name = metadata.text("general.architecture")
    heads = _by_layer(metadata, "attention.head_count_kv")
    return {
        "norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.whole(f"{name}.shortconv.l_cache"),
        "conv_bias": any(key.endswith("shortconv.in_proj.bias") for key in tensors),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


def lfm2_moe_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of LFM2-MoE, which has a sigmoid router."""
    if (scores := metadata.whole("lfm2moe.expert_gating_func", 2)) != 2:
        raise CheckpointError(
            f"{metadata.path}: lfm2moe.expert_gating_func is {scores}: expected 2, the sigmoid"
        )
    return lfm2_keys(metadata, tensors) | {
        "num_experts": metadata.whole("lfm2moe.expert_count"),
        "num_experts_per_tok": metadata.whole("lfm2moe.expert_used_count"),
        "moe_intermediate_size": metadata.whole("lfm2moe.expert_feed_forward_length"),
        "num_dense_layers": metadata.whole("lfm2moe.leading_dense_block_count"),
        "use_expert_bias": any(key.endswith("exp_probs_b.bias") for key in tensors),
    }


def _mamba_sizes(metadata: Metadata) -> dict[str, int]:
    keys = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    name = metadata.text("general.architecture")
    return {key: metadata.whole(f"{name}.ssm.{key}") for key in keys}


def falcon_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Falcon-H1; multipliers are left out: they are folded in."""
    sizes = _mamba_sizes(metadata)
    return {
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_d_ssm": sizes["inner_size"],
        "mamba_d_state": sizes["state_size"],
        "mamba_n_heads": sizes["time_step_rank"],
        "mamba_n_groups": sizes["group_count"],
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
    }


def granite_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Granite 4, with or without experts."""
    name, sizes = "granitehybrid", _mamba_sizes(metadata)
    heads, hidden = sizes["time_step_rank"], metadata.whole(f"{name}.embedding_length")
    if heads < 1 or hidden < 1 or sizes["inner_size"] % heads or sizes["inner_size"] % hidden:
        raise CheckpointError(
            f"{metadata.path}: {name}.ssm.inner_size is {sizes['inner_size']}: expected a multiple "
            f"of the {heads} heads and of the {hidden} channels of embedding_length"
        )
    gates = (tensors.get(f"blk.0.ffn_gate{end}.weight") for end in ("_shexp", ""))
    usual = max(_by_layer(metadata, "feed_forward_length"))
    shared = next((gate.shape[0] for gate in gates if gate is not None and gate.shape), usual)
    experts = metadata.whole(f"{name}.expert_count", 0)
    found: dict[str, Any] = {
        "layer_types": [
            "attention" if count else "mamba"
            for count in _by_layer(metadata, "attention.head_count_kv")
        ],
        "position_embedding_type": (
            "rope" if metadata.flag(f"{name}.rope.scaling.finetuned", True) else "nope"
        ),
        "attention_bias": any(key.endswith("attn_q.bias") for key in tensors),
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "mamba_n_heads": heads,
        "mamba_d_head": sizes["inner_size"] // heads,
        "mamba_expand": sizes["inner_size"] // hidden,
        "mamba_n_groups": sizes["group_count"],
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_conv_bias": any(key.endswith("ssm_conv1d.bias") for key in tensors),
        "mamba_proj_bias": any(key.endswith("ssm_in.bias") for key in tensors),
    }
    if experts:
        found["num_experts_per_tok"] = metadata.whole(f"{name}.expert_used_count")
    return found | multipliers(metadata)


def nemotron_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Nemotron-H's config.json; the time step limit is the published models'."""
    name, sizes = metadata.text("general.architecture"), _mamba_sizes(metadata)
    heads = _by_layer(metadata, "attention.head_count_kv")
    inner = _by_layer(metadata, "feed_forward_length")
    is_mixture = name == "nemotron_h_moe"
    kinds = [
        "attention" if keys else ("moe" if is_mixture else "mlp") if channels else "mamba"
        for keys, channels in zip(heads, inner, strict=True)
    ]
    found = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "conv_kernel": sizes["conv_kernel"],
        "ssm_state_size": sizes["state_size"],
        "mamba_num_heads": sizes["time_step_rank"],
        "mamba_head_dim": sizes["inner_size"] // max(sizes["time_step_rank"], 1),
        "n_groups": sizes["group_count"],
        "use_conv_bias": any(key.endswith("ssm_conv1d.bias") for key in tensors),
        "use_bias": any(key.endswith("ssm_in.bias") for key in tensors),
        "mlp_bias": any(key.endswith("ffn_up.bias") for key in tensors),
    }
    return found | (_nemotron_experts(metadata, name) if is_mixture else {})


def _nemotron_experts(metadata: Metadata, name: str) -> dict[str, Any]:
    metadata.whole(f"{name}.expert_shared_count", 1)  # known, not used: the next key is their total
    shared = metadata.whole(f"{name}.expert_shared_feed_forward_length")
    return {
        "n_routed_experts": metadata.whole(f"{name}.expert_count"),
        "num_experts_per_tok": metadata.whole(f"{name}.expert_used_count"),
        "moe_intermediate_size": metadata.whole(f"{name}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": shared,
        "norm_topk_prob": metadata.flag(f"{name}.expert_weights_norm", True),
        "routed_scaling_factor": metadata.number(f"{name}.expert_weights_scale", 1.0) or 1.0,
    }
