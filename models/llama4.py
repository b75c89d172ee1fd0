"""The text model of Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    layer_kinds,
    layer_numbers,
    number,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names
from mpjax.models.smollm import ropes_of

_MLP = "model.layers.{layer}.feed_forward"
_KINDS = ("full_attention", "chunked_attention")


class Llama4(Decoder):
    """Llama 4: attention in chunks, but full and without RoPE in every fourth layer; experts."""

    names: ClassVar[Names] = {
        **NAMES,
        "mlp.gate_up": (f"{_MLP}.gate_proj", f"{_MLP}.up_proj"),
        "mlp.down": f"{_MLP}.down_proj",
        "mlp.router": f"{_MLP}.router.weight",
        "mlp.experts.gate_up": f"{_MLP}.experts.{{expert}}.gate_up_proj",
        "mlp.experts.down": f"{_MLP}.experts.{{expert}}.down_proj",
        "mlp.shared.gate_up": tuple(f"{_MLP}.shared_expert.{x}_proj" for x in ("gate", "up")),
        "mlp.shared.down": f"{_MLP}.shared_expert.down_proj",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        **{"intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_local_experts": 16},
        **{"interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4},
        **{"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192},
        **{"attn_scale": 0.1, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Llama4ForCausalLM` config.json."""
        ropes = ropes_of({**hf, "no_rope_layers": hf.get("no_rope_layers") or None})
        chunk = None if hf["attention_chunk_size"] is None else integer(hf, "attention_chunk_size")
        usual = [_KINDS[rope == "global" and chunk is not None] for rope in ropes]
        kinds = layer_kinds({**hf, "layer_types": hf.get("layer_types") or usual}, _KINDS)
        inner = integer(hf, "intermediate_size")
        experts = ExpertsSpec(
            inner,
            num_experts=integer(hf, "num_local_experts"),
            experts_per_token=integer(hf, "num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=False,
            shared_size=inner,
            transposed_files=True,
            weighs_inputs=True,
        )
        dense, sparse = GatedMLPSpec(integer(hf, "intermediate_size_mlp")), _sparse_layers(hf)
        layers = tuple(
            LayerSpec(
                _attention(hf, rope, chunk if kind == "chunked_attention" else None),
                experts if layer in sparse else dense,
            )
            for layer, (rope, kind) in enumerate(zip(ropes, kinds, strict=True))
        )
        return DecoderConfig(**common_fields(hf, theta=5e5), layers=layers)


def _attention(hf: Mapping[str, Any], rope: str, chunk: int | None) -> GroupedQuerySpec:
    """The attention of a layer with a kind of RoPE, in chunks or of all tokens."""
    bias, is_rotated = flag(hf, "attention_bias"), rope == "global"
    grows = not is_rotated and _tunes(hf)
    return GroupedQuerySpec(
        chunk,
        bias,
        bias,
        qk_norm=is_rotated and flag(hf, "use_qk_norm"),
        norm_after=True,
        norm_weights=False,
        interleaved=True,
        rope=rope,
        chunked=chunk is not None,
        growth=float(number(hf, "attn_scale")) if grows else None,
        growth_context=integer(hf, "floor_scale"),
        growth_from_one=True,
    )


def _tunes(hf: Mapping[str, Any]) -> bool:
    """`attn_temperature_tuning`: a boolean, or an integer, of which only 0 is false."""
    key = "attn_temperature_tuning"
    return flag(hf, key) if isinstance(hf.get(key), bool) else integer(hf, key, minimum=0) > 0


def _sparse_layers(hf: Mapping[str, Any]) -> list[int]:
    """The layers with experts: `moe_layers`, else the last of each interval of layers."""
    if hf.get("moe_layers") is not None:
        return layer_numbers(hf, "moe_layers")
    step = integer(hf, "interleave_moe_layer_step")
    return [*range(step - 1, layer_count(hf), step)]
