"""The text models of Gemma 3n."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks, config_json, per_layer, streams
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import KINDS, flag, integer, layer_count
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.gemma import ACTIVATION, Gemma2, config_of
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import Names
from mpjax.models.per_layer import PerLayerSpec

_PATTERN = 5  # layers of a pattern, of which the last attends to all tokens
_SPARSE, _SHARE = 10, 0.95  # the first layers, and the share of their gates that is 0


class Gemma3n(Decoder):
    """Gemma 3n: four residual streams (AltUp), LAuReL, per-layer embeddings, sparse gates."""

    names: ClassVar[Names] = {**Gemma2.names, **per_layer.NAMES, **streams.NAMES}
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768},
        **{"sliding_window": 512, "eos_token_id": 1, "tie_word_embeddings": True},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
        **{"altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True},
        **{"num_kv_shared_layers": 15, "laurel_rank": 64, "final_logit_softcapping": 30.0},
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_activation": (None, ACTIVATION)}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma3nForCausalLM` config.json."""
        kinds = config_json.patterned_kinds(hf, _PATTERN)
        whole, local = config_json.ropes_by_kind(hf)
        theta, scaling = config_json.rotary(local, 1e4)
        count, gain = integer(hf, "altup_num_inputs"), flag(hf, "altup_correct_scale")
        active = integer(hf, "altup_active_idx", minimum=0, maximum=count - 1)
        inputs = PerLayerSpec(integer(hf, "hidden_size_per_layer_input"))
        parts = streams.StreamsSpec(count, integer(hf, "laurel_rank"), active + 1, gain)
        mixers = map(functools.partial(_attention, hf), kinds, config_json.shared_keys(hf, kinds))
        pairs = zip(mixers, _mlps(hf), strict=True)
        return config_of(
            whole,
            [LayerSpec(mixer, mlp, "both", False, inputs, parts) for mixer, mlp in pairs],
            theta=1e6,
            max_position_embeddings=integer(hf, "max_position_embeddings"),
            local_rope_theta=theta,
            local_rope_scaling=scaling,
            per_layer_vocab=integer(hf, "vocab_size_per_layer_input"),
        )


def _attention(hf: Mapping[str, Any], kind: str, distance: int | None) -> GroupedQuerySpec:
    bias, is_full = flag(hf, "attention_bias"), kind == KINDS[0]
    window, rope = config_json.sliding_window(hf), "global" if is_full else "local"
    spec = GroupedQuerySpec(None if is_full else window, bias, bias, qk_norm=True, rope=rope)
    return dataclasses.replace(spec, scale=1.0, value_norm=True, reads_back=distance)


def _mlps(hf: Mapping[str, Any]) -> list[GatedMLPSpec]:
    """The MLP of each layer, whose sizes, and shares of gates that are 0, may be listed."""
    count, size, share = layer_count(hf), "intermediate_size", "activation_sparsity_pattern"
    sizes = hf[size] if isinstance(hf.get(size), list) else [integer(hf, size)] * count
    shares = hf.get(share) or [_SHARE if i < _SPARSE < count else 0 for i in range(count)]
    for key, listed in {size: sizes, share: shares}.items():
        if not isinstance(listed, list) or len(listed) != count:
            config_checks.refuse(WHERE, key, listed, f"a list of {count} numbers")
    sizes = [integer({size: each}, size) for each in sizes]
    if any(type(each) not in (int, float) or not 0 <= each < 1 for each in shares):
        config_checks.refuse(WHERE, share, shares, "numbers of at least 0 and less than 1")
    pairs = zip(sizes, shares, strict=True)
    return [GatedMLPSpec(one, activation="gelu", sparsity=each or None) for one, each in pairs]
