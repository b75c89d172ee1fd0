"""Nemotron-H, and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, SublayerSpec
from mpjax.models.config_json import (
    MAXIMUM_LAYERS,
    common_fields,
    flag,
    grouped_experts,
    integer,
    number,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.granite_hybrid import mamba_names
from mpjax.models.mamba2 import Mamba2Spec
from mpjax.models.mlp import UngatedMLPSpec
from mpjax.models.parameters import Names

_LAYER = "backbone.layers.{layer}"
_MIXER = f"{_LAYER}.mixer"
ACTIVATION = "relu2"
# Letter of a layer in older files → its kind in newer ones.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {
    **{kind: kind for kind in _LETTERS.values()},
    **{"linear_attention": "mamba", "full_attention": "attention"},
}


class NemotronH(Decoder):
    """Nemotron-H: each layer is Mamba2, attention, an MLP or experts; no positional embedding.

    The MLPs have no gate; their activation is the square of ReLU.
    """

    names: ClassVar[Names] = {
        **mamba_names(_MIXER),
        "embedding": "backbone.embeddings.weight",
        "norm.weight": "backbone.norm_f.weight",
        "head": "lm_head.weight",
        "attention_norm.weight": f"{_LAYER}.norm.weight",
        "attention.qkv": tuple(f"{_MIXER}.{which}_proj" for which in "qkv"),
        "attention.output": f"{_MIXER}.o_proj",
        "cache_scales": tuple(f"{_MIXER}.{which}_scale" for which in "kv"),
        "mlp_norm.weight": f"{_LAYER}.norm.weight",
        "mlp.up": f"{_MIXER}.up_proj",
        "mlp.down": f"{_MIXER}.down_proj",
        "mlp.router": f"{_MIXER}.gate.weight",
        "mlp.router_correction": f"{_MIXER}.gate.e_score_correction_bias",
        "mlp.experts.gate_up": f"{_MIXER}.experts.{{expert}}.up_proj",
        "mlp.experts.down": f"{_MIXER}.experts.{{expert}}.down_proj",
        "mlp.shared.up": f"{_MIXER}.shared_experts.up_proj",
        "mlp.shared.down": f"{_MIXER}.shared_experts.down_proj",
    }
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, Mamba2Spec)
    # MTP layers, which mpjax does not use.
    spare: ClassVar[tuple[str, ...]] = ("mtp.",)
    aliases: ClassVar[Mapping[str, str]] = {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "eos_token_id": 2,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mlp_hidden_act": (None, ACTIVATION),
        "mamba_hidden_act": (None, "silu"),
        "moe_latent_size": (None,),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `NemotronHForCausalLM` config.json."""
        kinds, bias = _kinds(hf), flag(hf, "use_bias")
        mamba = Mamba2Spec(
            integer(hf, "mamba_num_heads"),
            integer(hf, "mamba_head_dim"),
            integer(hf, "n_groups"),
            integer(hf, "ssm_state_size"),
            float(number(hf, "layer_norm_epsilon")),
            integer(hf, "conv_kernel"),
            bias=bias,
            output_bias=bias,
            conv_bias=flag(hf, "use_conv_bias"),
            least_step=float(number(hf, "time_step_min")),
        )
        layers = {
            "mamba": LayerSpec(mamba, None),
            "attention": LayerSpec(GroupedQuerySpec(rope="none"), None),
            "mlp": LayerSpec(None, _mlp(hf)),
        }
        if "moe" in kinds:
            layers["moe"] = LayerSpec(None, _experts(hf))
        common = {**hf, "hidden_act": ACTIVATION}
        return DecoderConfig(
            **common_fields(common, activation=ACTIVATION, epsilon="layer_norm_epsilon"),
            layers=tuple(layers[kind] for kind in kinds),
        )


def _mlp(hf: Mapping[str, Any]) -> UngatedMLPSpec:
    return UngatedMLPSpec(
        integer(hf, "intermediate_size"), flag(hf, "mlp_bias"), activation=ACTIVATION
    )


def _experts(hf: Mapping[str, Any]) -> ExpertsSpec:
    if flag(hf, "mlp_bias"):
        config_checks.refuse(WHERE, "mlp_bias", True, "false with layers of kind moe")
    shared = integer(hf, "moe_shared_expert_intermediate_size")
    return ExpertsSpec(**grouped_experts(hf) | {"shared_size": shared, "ungated": ACTIVATION})


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, from a list or a string of letters; by default transformers' four."""
    if (written := hf.get("layers_block_type")) is not None:
        found = written if isinstance(written, list) else [None]
        kinds = [_KINDS.get(kind) if isinstance(kind, str) else None for kind in found]
        key, expected = "layers_block_type", f"a list of {', '.join(_KINDS)}"
    elif (written := hf.get("hybrid_override_pattern")) is not None:
        kinds = [_LETTERS.get(letter) for letter in written] if isinstance(written, str) else [None]
        key, expected = "hybrid_override_pattern", f"a text of {' '.join(_LETTERS)}"
    else:
        return ["mamba", "moe", "attention", "mlp"]
    if not kinds or len(kinds) > MAXIMUM_LAYERS or None in kinds:
        config_checks.refuse(WHERE, key, written, expected)
    return [kind for kind in kinds if kind is not None]
