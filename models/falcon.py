"""Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, SublayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, number
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.granite_hybrid import MAMBA_DEFAULTS, mamba_names, mamba_spec
from mpjax.models.mamba2 import Mamba2Spec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parallel import ParallelSpec
from mpjax.models.parameters import NAMES, Names

_LAYER = "model.layers.{layer}"
_FACTORS = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
# Key of a bias → factors that transformers applies before it adds the bias. Here the factor
# would also scale the bias.
_BEFORE_BIASES = {
    "attention_bias": ("attention_in_multiplier", "attention_out_multiplier"),
    "mamba_proj_bias": ("ssm_in_multiplier",),
    "projectors_bias": ("ssm_out_multiplier",),
}


class FalconH1(Decoder):
    """Falcon-H1: parallel attention and Mamba2 in each layer, and fixed multipliers (muP)."""

    names: ClassVar[Names] = {
        **{
            path.replace("attention.", "attention.attention.", 1): name
            for path, name in NAMES.items()
        },
        **mamba_names(f"{_LAYER}.mamba", "attention.recurrent"),
        "norm.weight": "model.final_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}.pre_ff_layernorm.weight",
        "mlp.gate_up": (f"{_LAYER}.feed_forward.gate_proj", f"{_LAYER}.feed_forward.up_proj"),
        "mlp.down": f"{_LAYER}.feed_forward.down_proj",
    }
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, Mamba2Spec, ParallelSpec)
    defaults: ClassVar[Mapping[str, Any]] = {
        **MAMBA_DEFAULTS,
        **dict.fromkeys(_FACTORS, 1.0),
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `FalconH1ForCausalLM` config.json."""
        for key, scales in _BEFORE_BIASES.items():
            if flag(hf, key) and (changed := [scale for scale in scales if number(hf, scale) != 1]):
                expected = f"false with {changed[0]} {hf[changed[0]]}, which scales biases here"
                config_checks.refuse(WHERE, key, True, expected)
        gate, down = _factors(hf, "mlp_multipliers", 2)
        if flag(hf, "mlp_bias") and down != 1:
            config_checks.refuse(WHERE, "mlp_bias", True, "false with a factor of the down map")
        bias, reading = flag(hf, "attention_bias"), number(hf, "attention_in_multiplier")
        of_values = reading * number(hf, "attention_out_multiplier")
        factors = reading, reading * number(hf, "key_multiplier"), of_values
        attention = GroupedQuerySpec(None, bias, bias, factors=_unless_ones(factors))
        layer = LayerSpec(
            ParallelSpec(attention, _mamba(hf)),
            GatedMLPSpec(
                integer(hf, "intermediate_size"),
                flag(hf, "mlp_bias"),
                factors=_unless_ones((gate, down)),
            ),
        )
        return DecoderConfig(
            **common_fields(hf),
            layers=(layer,) * layer_count(hf),
            embedding_scale=number(hf, "embedding_multiplier"),
            logit_scale=number(hf, "lm_head_multiplier"),
        )


def _mamba(hf: Mapping[str, Any]) -> Mamba2Spec:
    inner = integer(hf, "mamba_d_ssm", integer(hf, "mamba_expand") * integer(hf, "hidden_size"))
    norm = "none"
    if flag(hf, "mamba_rms_norm"):
        norm = "before_gate" if flag(hf, "mamba_norm_before_gate") else "after_gate"
    scale = number(hf, "ssm_in_multiplier")
    return mamba_spec(
        hf,
        inner,
        norm=norm,
        output_bias=flag(hf, "projectors_bias"),
        factors=_unless_ones(tuple(scale * x for x in _factors(hf, "ssm_multipliers", 5))),
        output_factor=float(number(hf, "ssm_out_multiplier")),
    )


def _factors(hf: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    found = hf[key]
    if not isinstance(found, list) or len(found) != count:
        config_checks.refuse(WHERE, key, found, f"a list of {count} numbers")
    return tuple(float(config_checks.positive(WHERE, key, each)) for each in found)


def _unless_ones(factors: tuple[float, ...]) -> tuple[float, ...]:
    """The factors, or () if all are 1."""
    return () if set(factors) == {1} else tuple(float(each) for each in factors)
