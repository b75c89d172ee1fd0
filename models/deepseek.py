"""DeepSeek-V2, V3 and V3.2, and models of their shape: Kimi K2, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.config import DecoderConfig, LayerSpec, SublayerSpec
from mpjax.models.config_json import (
    ORIGINAL,
    common_fields,
    flag,
    grouped_experts,
    integer,
    layer_count,
    number,
    require,
    rotary_object,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.latent import LatentSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names, expert_names
from mpjax.models.rotary import yarn_attention_factor

_MIXER = "model.layers.{layer}.self_attn"
LATENT_NAMES: Names = {
    "attention.joint": (f"{_MIXER}.q_proj", f"{_MIXER}.kv_a_proj_with_mqa"),
    "attention.down": (f"{_MIXER}.q_a_proj", f"{_MIXER}.kv_a_proj_with_mqa"),
    "attention.query": f"{_MIXER}.q_b_proj",
    "attention.query_norm.weight": f"{_MIXER}.q_a_layernorm.weight",
    "attention.latent_norm.weight": f"{_MIXER}.kv_a_layernorm.weight",
    "attention.expand": f"{_MIXER}.kv_b_proj",
}
_SIZES: Mapping[str, Any] = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    **{"v_head_dim": 128, "rope_interleave": True},
}


class _Latent(Decoder):
    """Base class of the families with latent attention and DeepSeek's routers."""

    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, LatentSpec)
    names: ClassVar[Names] = {**NAMES, **expert_names(), **LATENT_NAMES}
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    has_spare_layers: ClassVar[bool] = True
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "moe_layer_freq": (None, 1),
        "mlp_bias": (None, False),
    }


class DeepseekV2(_Latent):
    """DeepSeek-V2 and V2-Lite: multi-head latent attention (MLA), shared experts."""

    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    defaults: ClassVar[Mapping[str, Any]] = {
        **{**_SIZES, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"routed_scaling_factor": 1.0, "topk_method": "greedy", "moe_intermediate_size": 1407},
        "eos_token_id": 2,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "softmax"),
        "moe_layer_freq": (None, 1),
        "norm_topk_prob": (None, False),
        "mlp_bias": (None, False),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `DeepseekV2ForCausalLM` config.json."""
        methods = "greedy", "group_limited_greedy"
        method = config_checks.choice(WHERE, "topk_method", hf["topk_method"], methods)
        groups = {} if method == "greedy" else {key: require(hf, key) for key in _GROUPS}
        experts = {**grouped_experts({**hf, **dict.fromkeys(_GROUPS, 1), **groups})}
        found = {"scoring": "softmax", "renormalize": False, "router_correction": False}
        found |= {"group_score": "max"} if "group_score" in experts else {}
        return latent_config({**hf, "rope_interleave": True}, experts | found)


class DeepseekV3(_Latent):
    """DeepSeek-V3, R1 and Kimi K2: MLA; group-limited sigmoid router with a selection bias."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **{**_SIZES, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "moe_intermediate_size": 2048, "eos_token_id": 1},
        **{"max_position_embeddings": 4096, "num_key_value_heads": 128},
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `DeepseekV3ForCausalLM` config.json."""
        return latent_config(hf, grouped_experts(hf))


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2 up to `index_topk` tokens, up to which its sparse attention is dense."""

    spare: ClassVar[tuple[str, ...]] = tuple(
        f".self_attn.indexer.{name}"
        for name in (
            *("wq_b.weight", "wq_b.weight_scale_inv", "wk.weight", "wk.weight_scale_inv"),
            *("k_norm.weight", "k_norm.bias", "weights_proj.weight"),
        )
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **{**DeepseekV3.defaults, "index_topk": 2048, "max_position_embeddings": 163840},
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `DeepseekV32ForCausalLM` config.json."""
        config = super().read_config({**hf, "rope_interleave": True})
        most = min(config.max_position_embeddings, integer(hf, "index_topk"))
        return dataclasses.replace(config, max_position_embeddings=most)


class Glm4MoELite(_Latent):
    """GLM-4.7-Flash: DeepSeek-V3 with heads of 256 channels, and one group of experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **{**_SIZES, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **{"n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8},
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True},
        **{"moe_intermediate_size": 1536, "max_position_embeddings": 202752, "eos_token_id": 1},
        **{"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_key_value_heads": 20},
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Glm4MoeLiteForCausalLM` config.json."""
        return latent_config(hf, grouped_experts(hf))


class Mistral4(_Latent):
    """Mistral Small 4: MLA; softmax router, and position-dependent query scaling."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **{**_SIZES, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64},
        **{"first_k_dense_replace": 0, "n_routed_experts": 128, "n_shared_experts": 1},
        **{"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
        **{"norm_topk_prob": True, "moe_intermediate_size": 2048, "eos_token_id": 2},
        **{"max_position_embeddings": 1048576, "num_key_value_heads": 32},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, ORIGINAL: 8192},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Mistral4ForCausalLM` config.json."""
        rope, where = rotary_object(hf), f"{WHERE}, rotary scaling"
        growth: dict[str, Any] = {
            "growth": float(number(rope, "llama_4_scaling_beta", where=where)),
            "growth_context": integer(rope, ORIGINAL),
        }
        experts = grouped_experts(hf) | {"scoring": "softmax", "router_correction": False}
        return latent_config(hf, experts, partial_rotary=True, **growth)


_GROUPS = ("n_group", "topk_group")


def latent_config(
    hf: Mapping[str, Any],
    experts: Mapping[str, Any],
    *,
    partial_rotary: bool = False,
    **fields: Any,
) -> DecoderConfig:
    """The configuration of layers with latent attention; the first layers have no experts.

    experts: fields of the ExpertsSpec of the other layers. partial_rotary: as for `common_fields`.
    fields: further fields of the LatentSpec.
    """
    rank, rotated, keys, values = (
        integer(hf, key)
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    common = common_fields({**hf, "head_dim": keys + rotated}, partial_rotary=partial_rotary)
    heads = common["num_heads"]
    if common["num_kv_heads"] != heads:
        expected = f"{heads}, one for each head"
        config_checks.refuse(WHERE, "num_key_value_heads", common["num_kv_heads"], expected)
    if common["rotary_dim"] not in (None, rotated):
        expected = f"{rotated} of the {keys + rotated} channels of a head, by qk_rope_head_dim"
        config_checks.refuse(WHERE, "partial_rotary_factor", common["rotary_dim"], expected)
    attention = LatentSpec(
        rank=rank,
        rotary=rotated,
        keys=keys,
        values=values,
        query_rank=None if hf["q_lora_rank"] is None else integer(hf, "q_lora_rank"),
        bias=flag(hf, "attention_bias"),
        interleaved=flag(hf, "rope_interleave"),
        scale=(keys + rotated) ** -0.5 * _growth_of_scores(hf) ** 2,
        **fields,
    )
    mlps = GatedMLPSpec(integer(hf, "intermediate_size")), ExpertsSpec(**experts)
    layers = tuple(LayerSpec(attention, mlps[sparse]) for sparse in has_experts(hf))
    return DecoderConfig(**common | {"rotary_dim": rotated}, layers=layers)


def has_experts(hf: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has experts: by `mlp_layer_types`, else in all but the first layers."""
    layers = layer_count(hf)
    if (kinds := hf.get("mlp_layer_types")) is None:
        dense = integer(hf, "first_k_dense_replace", minimum=0)
        return [number >= dense for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        config_checks.refuse(WHERE, "mlp_layer_types", kinds, f"{layers} of dense and sparse")
    return [kind == "sparse" for kind in kinds]


def _growth_of_scores(hf: Mapping[str, Any]) -> float:
    """The factor of queries and keys for YaRN's `mscale_all_dim`."""
    rope = rotary_object(hf)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    share = number(rope, "mscale_all_dim", where=f"{WHERE}, rotary scaling")
    factor = number(rope, "factor", where=f"{WHERE}, rotary scaling")
    return yarn_attention_factor(factor, share)
