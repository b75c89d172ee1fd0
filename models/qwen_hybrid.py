"""Qwen3-Next, and Qwen3.5, 3.6 and 3.8: Gated DeltaNet in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, MixerSpec, SublayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, layer_kinds
from mpjax.models.decoder import Decoder
from mpjax.models.gated_delta import GatedDeltaSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.mtp import MTPSpec, mtp_names
from mpjax.models.parameters import Names
from mpjax.models.qwen_moe import MIXTURE_NAMES, experts_with_shared, mixture_layers

_MIXER = "model.layers.{layer}.linear_attn"
_NAMES: Names = {
    **MIXTURE_NAMES,
    "attention.qkvz": (*[f"{_MIXER}.in_proj_qkv"] * 3, f"{_MIXER}.in_proj_z"),
    "attention.ba": (f"{_MIXER}.in_proj_b", f"{_MIXER}.in_proj_a"),
    "attention.conv": f"{_MIXER}.conv1d.weight",
    "attention.decay": f"{_MIXER}.A_log",
    "attention.shift": f"{_MIXER}.dt_bias",
    "attention.scale": f"{_MIXER}.norm.weight",
    "attention.out": f"{_MIXER}.out_proj",
}
_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_OF_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class _Hybrid(Decoder):
    """Base class of the families with Gated DeltaNet."""

    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (
        *Decoder.specs,
        GatedDeltaSpec,
        MTPSpec,
    )
    names: ClassVar[Names] = _NAMES
    draft_names: ClassVar[Names] = mtp_names(_NAMES)
    # Tensors of the MTP head, which is loaded only with mtp=True.
    spare: ClassVar[tuple[str, ...]] = ("mtp.",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish", "silu"),
        "mamba_ssm_dtype": (None, "float32"),
    }


class Qwen3Next(_Hybrid):
    """Qwen3-Next: Gated DeltaNet, whose projections files interleave by key head, and experts."""

    names: ClassVar[Names] = {
        **_NAMES,
        "attention.qkvz": f"{_MIXER}.in_proj_qkvz",
        "attention.ba": f"{_MIXER}.in_proj_ba",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        **_OF_EXPERTS,
        "num_experts_per_tok": 10,
        "num_local_experts": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen3NextForCausalLM` config.json."""
        mixers = _mixers(hf, by_key_head=True)
        return _config(hf, mixture_layers(hf, mixers, experts_with_shared(hf)))


class Qwen35(_Hybrid):
    """Qwen3.5, and the dense models of 3.6 and 3.8."""

    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "num_key_value_heads": 4}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen3_5ForCausalLM` config.json."""
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        return _config(hf, tuple(LayerSpec(mixer, mlp) for mixer in _mixers(hf)))


class Qwen35MoE(_Hybrid):
    """Qwen3.5 and 3.6 with experts in each layer, whose weights always add up to 1."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        **_OF_EXPERTS,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen3_5MoeForCausalLM` config.json."""
        experts = experts_with_shared({**hf, "norm_topk_prob": True})
        return _config(hf, tuple(LayerSpec(mixer, experts) for mixer in _mixers(hf)))


def _config(hf: Mapping[str, Any], layers: tuple[LayerSpec, ...]) -> DecoderConfig:
    common = common_fields(hf, partial_rotary=True)
    return DecoderConfig(**common, layers=layers, offset_norms=True)


def _mixers(hf: Mapping[str, Any], *, by_key_head: bool = False) -> list[MixerSpec]:
    """The mixer of each layer: by `layer_types`, else attention at the end of each interval."""
    bias, count = flag(hf, "attention_bias"), layer_count(hf)
    linear = GatedDeltaSpec(
        integer(hf, "linear_num_key_heads"),
        integer(hf, "linear_num_value_heads"),
        integer(hf, "linear_key_head_dim"),
        integer(hf, "linear_value_head_dim"),
        integer(hf, "linear_conv_kernel_dim", minimum=2),
        by_key_head,
    )
    known: dict[str, MixerSpec] = {
        "linear_attention": linear,
        "full_attention": GroupedQuerySpec(None, bias, bias, qk_norm=True, output_gate=True),
    }
    every = integer(hf, "full_attention_interval")
    usual = [[*known][(number + 1) % every == 0] for number in range(count)]
    kinds = layer_kinds({**hf, "layer_types": hf.get("layer_types") or usual}, known)
    return [known[kind] for kind in kinds]
