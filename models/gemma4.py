"""The text models of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks, config_json, per_layer
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, MLPSpec
from mpjax.models.config_json import KINDS, flag, integer, layer_count
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.gemma import ACTIVATION, Gemma2, config_of
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import Names, expert_names
from mpjax.models.per_layer import PerLayerSpec

_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    {},
)
_LAYER = "model.layers.{layer}."
SIZES = ("head_dim", "num_key_value_heads")  # of layers
_PATTERN = 6  # of layers, of which the last attends to all tokens


class Gemma4(Decoder):
    """Gemma 4: larger heads in full-attention layers, keys as values; per-layer embeddings."""

    names: ClassVar[Names] = {
        **{**Gemma2.names, **per_layer.NAMES},
        **expert_names(_LAYER.removesuffix(".")),
        **{f"mlp.shared.{path}": Gemma2.names[f"mlp.{path}"] for path in ("gate_up", "down")},
        "mlp.router": f"{_LAYER}router.proj.weight",
        "mlp.norms.router_scale": f"{_LAYER}router.scale",
        "mlp.norms.gain": f"{_LAYER}router.per_expert_scale",
        "mlp.norms.routed_norm.weight": f"{_LAYER}pre_feedforward_layernorm_2.weight",
        "mlp.norms.routed_post_norm.weight": f"{_LAYER}post_feedforward_layernorm_2.weight",
        "mlp.norms.shared_norm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
        "mlp.norms.shared_post_norm.weight": f"{_LAYER}post_feedforward_layernorm_1.weight",
        "scale": f"{_LAYER}layer_scalar",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
        **{"max_position_embeddings": 131072, "sliding_window": 512, "eos_token_id": 1},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
        **{"tie_word_embeddings": True, "rope_parameters": dict(zip(KINDS, _ROPES, strict=True))},
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": (None, ACTIVATION),
        "use_bidirectional_attention": (None, "vision"),  # of the tokens of images alone
        "per_layer_config": (),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma4ForCausalLM` config.json."""
        # The last layer always attends to all tokens.
        kinds = [*config_json.patterned_kinds(hf, _PATTERN)[:-1], KINDS[0]]
        size = integer(hf, "hidden_size_per_layer_input", minimum=0)
        back = config_json.shared_keys(hf, kinds)
        # No other rotary key counts.
        own = {**hf, **dict.fromkeys(("rope_scaling", "rope_theta", "rope_local_base_freq"))}
        whole, local = config_json.ropes_by_kind(own)
        theta, scaling = config_json.rotary(local, 1e4)
        least = integer(hf, "vocab_size")
        return config_of(
            whole,
            [
                LayerSpec(
                    _attention(hf, kind, number, distance),
                    _mlp(hf, is_reader=distance is not None),
                    "both",
                    scaled=True,
                    per_layer=PerLayerSpec(size) if size else None,
                )
                for number, (kind, distance) in enumerate(zip(kinds, back, strict=True))
            ],
            max_position_embeddings=integer(hf, "max_position_embeddings"),
            local_rope_theta=theta,
            local_rope_scaling=scaling,
            per_layer_vocab=integer(hf, "vocab_size_per_layer_input", minimum=least)
            if size
            else None,
        )


def _attention(
    hf: Mapping[str, Any], kind: str, number: int, distance: int | None
) -> GroupedQuerySpec:
    """The attention of a layer."""
    is_full, bias = kind == KINDS[0], flag(hf, "attention_bias")
    shares = is_full and flag(hf, "attention_k_eq_v")
    usual = {key: integer(hf, key) for key in SIZES}
    found = {key: integer({**hf, **_overrides(hf, number, kind)}, key) for key in SIZES}
    dim, heads = (None if found[key] == usual[key] else found[key] for key in SIZES)
    return GroupedQuerySpec(
        None if is_full else config_json.sliding_window(hf),
        bias,
        bias,
        qk_norm=True,
        scale=1.0,
        rope="global" if is_full else "local",
        heads=integer(hf, "num_attention_heads") if heads else None,
        kv_heads=heads,
        head_dim=dim,
        keys_as_values=shares,
        value_norm=True,
        reads_back=distance,
    )


def _overrides(hf: Mapping[str, Any], number: int, kind: str) -> Mapping[str, Any]:
    """The sizes of heads in a layer that differ from those of the whole file, by key.

    Newer files list them in `per_layer_config`. In others, layers that attend to all tokens have
    sizes of their own. Raises ConfigError for other keys in `per_layer_config`, or for no layer.
    """
    if (written := hf.get("per_layer_config")) is None:
        wide = ["global_head_dim", "num_global_key_value_heads"][: 1 + flag(hf, "attention_k_eq_v")]
        found = dict(zip(SIZES, (hf.get(key) for key in wide), strict=False))
        return {k: v for k, v in found.items() if v is not None and kind == KINDS[0]}
    each = [*written.values()] if isinstance(written, Mapping) else [None]
    if not all(isinstance(one, Mapping) and {*one} <= {*SIZES} for one in each):
        expected = f"an object for each layer that differs, with {' and '.join(SIZES)}"
        config_checks.refuse(WHERE, "per_layer_config", written, expected)
    if unknown := {*written} - {*map(str, range(count := layer_count(hf)))}:
        expected = f"only layers, '0' to '{count - 1}', as keys, not {sorted(unknown)}"
        config_checks.refuse(WHERE, "per_layer_config", written, expected)
    own: Mapping[str, Any] = written.get(str(number), {})
    return own


def _mlp(hf: Mapping[str, Any], *, is_reader: bool) -> MLPSpec:
    """The MLP of a layer; beside experts it is their shared expert.

    is_reader: whether the layer reads another layer's keys: its MLP may be twice as wide.
    """
    wide = is_reader and flag(hf, "use_double_wide_mlp")
    inner = integer(hf, "intermediate_size") * (1 + wide)
    if not flag(hf, "enable_moe_block"):
        return GatedMLPSpec(inner, activation="gelu")
    return ExpertsSpec(
        integer(hf, "moe_intermediate_size"),
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "top_k_experts"),
        shared_size=inner,
        activation="gelu",
        own_norms=True,
    )
