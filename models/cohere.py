"""Cohere's Command R, Command A, and its mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, MLPSpec
from mpjax.models.config_json import (
    KINDS,
    common_fields,
    flag,
    integer,
    layer_count,
    layer_windows,
    number,
    patterned_windows,
    sliding_window,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.deepseek import has_experts
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names, expert_names

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}


class Cohere(Decoder):
    """Command R: parallel attention and MLP after one shared LayerNorm; interleaved RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (None, False)}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `CohereForCausalLM` config.json."""
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        return _config(hf, [_layer(hf, None, mlp)] * layer_count(hf), theta=5e5)


class Cohere2(Decoder):
    """Command R7B and A: Command R with sliding windows; full-attention layers have no RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Cohere2ForCausalLM` config.json."""
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        windows = patterned_windows(hf)
        return _config(hf, [_layer(hf, w, mlp, is_rotated=w is not None) for w in windows])


class Cohere2MoE(Decoder):
    """Command A+: Command A with experts and a shared expert, whose sum or mean it takes."""

    names: ClassVar[Names] = {**NAMES, **expert_names()}
    defaults: ClassVar[Mapping[str, Any]] = {
        **Cohere2.defaults,
        **{"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0, "head_dim": 128},
        **{"expert_selection_fn": "softmax", "shared_expert_combination_strategy": "average"},
        **{"norm_topk_prob": True, "prefix_dense_sliding_window_pattern": 1},
        **{"first_k_dense_replace": 0, "rms_norm_eps": None},
    }
    # transformers ignores it in this family, and reads `rope_parameters`.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rope_scaling": (None,)}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Cohere2MoeForCausalLM` config.json."""
        count, own = layer_count(hf), integer(hf, "prefix_dense_sliding_window_pattern")
        first = integer(hf, "first_k_dense_replace", 0, minimum=0, maximum=count)
        every = integer(hf, "sliding_window_pattern")
        usual = [KINDS[(i + 1) % own != 0] for i in range(first)]
        usual += [KINDS[(i + 1) % every != 0] for i in range(count - first)]
        kinds = {**hf, "layer_types": hf.get("layer_types") or usual}
        windows = layer_windows(kinds, sliding_window(hf))
        usual_size = integer(hf, "intermediate_size")
        dense = GatedMLPSpec(integer(hf, "prefix_dense_intermediate_size", usual_size))
        mlps = [_experts(hf) if is_sparse else dense for is_sparse in has_experts(hf)]
        # With a prefix of full attention, all dense layers have RoPE.
        turned = [
            w is not None or (m is dense and own == 1) for w, m in zip(windows, mlps, strict=True)
        ]
        triples = zip(windows, mlps, turned, strict=True)
        layers = [_layer(hf, w, mlp, is_rotated=each) for w, mlp, each in triples]
        epsilons = "rms_norm_eps", "layer_norm_eps"  # of RMSNorm if a file has its epsilon
        return _config(hf, layers, epsilon=epsilons[hf.get(epsilons[0]) is None])


def _experts(hf: Mapping[str, Any]) -> ExpertsSpec:
    known = {
        "expert_selection_fn": ("softmax", "sigmoid"),
        "shared_expert_combination_strategy": ("average", "sum"),
    }
    scoring, joins = (config_checks.choice(WHERE, key, hf[key], known[key]) for key in known)
    inner, shared = (
        integer(hf, key, minimum=least)
        for key, least in (("intermediate_size", 1), ("num_shared_experts", 0))
    )
    is_mean = joins == "average" and shared > 0
    return ExpertsSpec(
        inner,
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        scoring=scoring,
        renormalize=scoring == "softmax" or flag(hf, "norm_topk_prob"),
        scale=0.5 if is_mean else 1.0,
        shared_size=inner * shared or None,
        shared_factor=0.5 if is_mean else None,
    )


def _layer(
    hf: Mapping[str, Any], window: int | None, mlp: MLPSpec, *, is_rotated: bool = True
) -> LayerSpec:
    bias, rope = flag(hf, "attention_bias"), "global" if is_rotated else "none"
    mixer = GroupedQuerySpec(window, bias, bias, interleaved=True, rope=rope)
    return LayerSpec(mixer, mlp, "shared")


def _config(
    hf: Mapping[str, Any],
    layers: Sequence[LayerSpec],
    *,
    theta: float = 1e4,
    epsilon: str = "layer_norm_eps",
) -> DecoderConfig:
    return DecoderConfig(
        **common_fields(hf, theta=theta, epsilon=epsilon),
        layers=tuple(layers),
        centered_norms=epsilon == "layer_norm_eps",
        logit_scale=number(hf, "logit_scale"),
    )
