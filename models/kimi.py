"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention in the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks, parameters
from mpjax.models.config import DecoderConfig, SublayerSpec
from mpjax.models.config_json import grouped_experts, integer, layer_count, layer_kinds
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.deepseek import LATENT_NAMES, latent_config
from mpjax.models.kimi_delta import KimiDeltaSpec
from mpjax.models.latent import LatentSpec
from mpjax.models.parameters import NAMES, ArrayPlace, Names, expert_names

_LAYER = "model.layers.{layer}"
_MIXER = f"{_LAYER}.self_attn"
_KINDS = ("linear_attention", "full_attention")
_LISTS = ("kda_layers", "full_attn_layers")  # in linear_attn_config, of numbers from 1 on


class KimiLinear(Decoder):
    """Kimi Linear: Kimi Delta Attention in 3 of 4 layers, MLA without RoPE, and experts."""

    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, LatentSpec, KimiDeltaSpec)
    names: ClassVar[Names] = {
        **NAMES,
        **expert_names(f"{_LAYER}.block_sparse_moe", ("w1", "w3", "w2")),
        **LATENT_NAMES,
        "attention.low": tuple(f"{_MIXER}.{name}_proj" for name in ("f_a", "g_a", "b")),
        "attention.decays": f"{_MIXER}.f_b_proj",
        "attention.gates": f"{_MIXER}.g_b_proj",
        "attention.out": f"{_MIXER}.o_proj",
        "attention.query_conv": f"{_MIXER}.q_conv1d.weight",
        "attention.key_conv": f"{_MIXER}.k_conv1d.weight",
        "attention.value_conv": f"{_MIXER}.v_conv1d.weight",
        "attention.decay": f"{_MIXER}.A_log",
        "attention.shift": f"{_MIXER}.dt_bias",
        "attention.scale": f"{_MIXER}.o_norm.weight",
    }
    # transformers writes the MLPs of layers without experts under this name.
    renamed: ClassVar[Mapping[str, str]] = {
        f".block_sparse_moe.{name}_proj": f".mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"first_k_dense_replace": 1, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 1024, "eos_token_id": 163586},
        **{"max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "linear_head_dim": 128},
        **{"linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "moe_router_activation_func": (None, "sigmoid"),
        "mla_use_nope": (None, True),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `KimiLinearForCausalLM` config.json."""
        written = hf.get("linear_attn_config") or {}
        if not isinstance(written, Mapping):
            config_checks.refuse(WHERE, "linear_attn_config", written, "an object")
        heads = integer(written, "num_heads", integer(hf, "linear_num_heads"))
        channels = integer(written, "head_dim", integer(hf, "linear_head_dim"))
        width = integer(hf, "linear_conv_kernel_dim", minimum=2)
        width = integer(written, "short_conv_kernel_size", width, minimum=2)
        mixer = KimiDeltaSpec(heads, heads, channels, channels, width)
        plain = {**hf, "rope_parameters": None, "rope_scaling": None, "rope_interleave": False}
        config = latent_config(plain, grouped_experts(hf), rope="none")
        usual = hf.get("layer_types") or _kinds(hf, written)
        layers = tuple(
            dataclasses.replace(layer, attention=mixer) if kind == _KINDS[0] else layer
            for layer, kind in zip(
                config.layers, layer_kinds({**hf, "layer_types": usual}, _KINDS), strict=True
            )
        )
        return dataclasses.replace(config, layers=layers)

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Places of all parameters outside linear maps; files have the decays' rates in 4 axes."""
        places = parameters.array_places(config, cls.names)
        rates = {place.path for place in places if place.path.endswith("attention.decay")}
        return [dataclasses.replace(x, leading=2) if x.path in rates else x for x in places]


def _kinds(hf: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: by `linear_attn_config`, else full attention in layers 4, 8, …."""
    count = layer_count(hf)
    lists = [written.get(key) for key in _LISTS]
    if None in lists:
        return [_KINDS[number > 0 and number % 4 == 0] for number in range(count)]
    listed = {number: kind for kind, own in zip(_KINDS, lists, strict=True) for number in own or ()}
    if not all(isinstance(own, list) for own in lists) or {*listed} != {*range(1, count + 1)}:
        expected = f"{' and '.join(_LISTS)} with each layer from 1 to {count}"
        config_checks.refuse(WHERE, "linear_attn_config", lists, expected)
    return [listed[number] for number in range(1, count + 1)]
