"""Granite 4: Mamba2 and attention, with or without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks, config_json
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import (
    ConfigError,
    DecoderConfig,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    SublayerSpec,
)
from mpjax.models.config_json import flag, integer, number
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.granite import Granite, granite_config
from mpjax.models.mamba2 import Mamba2Spec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.block_sparse_moe"
# Keys of Mamba2 layers and their defaults in transformers' classes.
MAMBA_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, float("inf")],
}


def mamba_names(block: str, path: str = "attention") -> dict[str, str | tuple[str, ...]]:
    """Tensor names of a Mamba2 mixer. block: its module in files. path: its path in the layer."""
    return {
        f"{path}.in_proj": f"{block}.in_proj",
        f"{path}.conv": f"{block}.conv1d.weight",
        f"{path}.conv_bias": f"{block}.conv1d.bias",
        f"{path}.log_rate": f"{block}.A_log",
        f"{path}.step_bias": f"{block}.dt_bias",
        f"{path}.skip": f"{block}.D",
        f"{path}.norm.weight": f"{block}.norm.weight",
        f"{path}.out_proj": f"{block}.out_proj",
    }


class GraniteHybrid(Decoder):
    """Granite 4: Granite with Mamba2 in most layers, and a shared expert beside experts."""

    names: ClassVar[Names] = {
        **NAMES,
        **mamba_names(f"{_LAYER}.mamba"),
        "mlp.gate_up": f"{_LAYER}.shared_mlp.input_linear",
        "mlp.down": f"{_LAYER}.shared_mlp.output_linear",
        "mlp.router": f"{_EXPERTS}.router.layer.weight",
        "mlp.experts.gate_up": f"{_EXPERTS}.experts.{{expert}}.input_linear",
        "mlp.experts.down": f"{_EXPERTS}.experts.{{expert}}.output_linear",
        "mlp.shared.gate_up": f"{_LAYER}.shared_mlp.input_linear",
        "mlp.shared.down": f"{_LAYER}.shared_mlp.output_linear",
    }
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, Mamba2Spec)
    defaults: ClassVar[Mapping[str, Any]] = {
        **Granite.defaults,
        **MAMBA_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": (None, "nope", "rope")
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GraniteMoeHybridForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        attention = GroupedQuerySpec(
            None,
            bias,
            bias,
            scale=float(number(hf, "attention_multiplier")),
            rope="global" if hf.get("position_embedding_type") == "rope" else "none",
        )
        mamba = mamba_spec(hf, inner=integer(hf, "mamba_expand") * integer(hf, "hidden_size"))
        mixers: dict[str, MixerSpec] = {"mamba": mamba, "linear_attention": mamba}
        mixers |= dict.fromkeys(("attention", "full_attention"), attention)
        listed = hf.get("layer_types") or hf.get("layers_block_type")
        kinds = listed or ["mamba"] * config_json.layer_count(hf)
        kinds = config_json.layer_kinds({**hf, "layer_types": kinds}, mixers)
        mlp = _mlp(hf)
        return granite_config(hf, [LayerSpec(mixers[kind], mlp) for kind in kinds])


def _mlp(hf: Mapping[str, Any]) -> MLPSpec:
    shared, experts = (
        integer(hf, "shared_intermediate_size"),
        integer(hf, "num_local_experts", minimum=0),
    )
    if not experts:
        return GatedMLPSpec(shared)
    return ExpertsSpec(
        integer(hf, "intermediate_size"),
        num_experts=experts,
        experts_per_token=integer(hf, "num_experts_per_tok"),
        shared_size=shared,
    )


def mamba_spec(hf: Mapping[str, Any], inner: int, **fields: Any) -> Mamba2Spec:
    """The spec of Mamba2 layers, from the keys that begin with `mamba_`.

    inner: channels of all heads. fields: further fields of the spec. Raises ConfigError.
    """
    heads = integer(hf, "mamba_n_heads")
    dim = inner // heads if hf["mamba_d_head"] == "auto" else integer(hf, "mamba_d_head")
    if heads * dim != inner:
        raise ConfigError(
            f"{WHERE}: mamba_n_heads is {heads} and mamba_d_head {dim}: expected a product of "
            f"{inner}"
        )
    bias = flag(hf, "mamba_proj_bias")
    least, most = step_limits(hf, "time_step_limit")
    given: dict[str, Any] = {
        "heads": heads,
        "head_dim": dim,
        "groups": integer(hf, "mamba_n_groups"),
        "states": integer(hf, "mamba_d_state"),
        "epsilon": number(hf, "rms_norm_eps"),
        "width": integer(hf, "mamba_d_conv"),
        "conv_bias": flag(hf, "mamba_conv_bias"),
        **{"bias": bias, "output_bias": bias, "least_step": least, "most_step": most},
    }
    return Mamba2Spec(**given | fields)


def step_limits(hf: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """The lower and upper limits of steps; None for 0 and for infinity. Raises ConfigError.

    transformers writes infinity as an object, since JSON has no infinity.
    """
    found, infinity = hf[key], float("inf")
    pair = found if isinstance(found, list | tuple) else []
    pair = [infinity if each == {"__float__": "Infinity"} else each for each in pair]
    if len(pair) != 2 or any(type(each) not in (int, float) or not each >= 0 for each in pair):
        config_checks.refuse(WHERE, key, found, "two numbers, 0 or more")
    least, most = pair
    return (least or None), (None if most == infinity else most)
