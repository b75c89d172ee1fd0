"""Decoders as Flax NNX modules, with weights and KV caches in any precision."""

from mpjax.models.attention import Attention, GroupedQuerySpec
from mpjax.models.cache_scales import CacheScales
from mpjax.models.config import (
    AttentionSpec,
    ConfigError,
    DecoderConfig,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    RopeScaling,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import Experts, ExpertsSpec
from mpjax.models.gated_delta import GatedDelta, GatedDeltaSpec
from mpjax.models.gemma import Gemma, Gemma2, Gemma3
from mpjax.models.gpt_oss import GptOss
from mpjax.models.granite import Granite
from mpjax.models.latent import LatentAttention, LatentSpec
from mpjax.models.layer import DecoderLayer
from mpjax.models.layers import FusedLinear, Linear, Packed, RMSNorm
from mpjax.models.llama import Llama, llama_layers
from mpjax.models.maps import LinearMaps
from mpjax.models.mistral import Mistral
from mpjax.models.mixtral import Mixtral
from mpjax.models.mlp import GatedMLP, GatedMLPSpec
from mpjax.models.olmo import Olmo2
from mpjax.models.parameters import ArrayPlace, ExpertPlace, LinearPlace
from mpjax.models.phi import Phi3
from mpjax.models.qwen import Qwen2, Qwen3
from mpjax.models.qwen_hybrid import Qwen3Next, Qwen35, Qwen35MoE
from mpjax.models.qwen_moe import Qwen2MoE, Qwen3MoE
from mpjax.models.registry import FAMILIES, family
from mpjax.models.smollm import SmolLM3
from mpjax.models.state import DecoderCache, SequenceState, StepContext
from mpjax.models.trainable import trainable
from mpjax.models.watch import Addition, Replacement, Steer

__all__ = [
    "FAMILIES",
    "Addition",
    "ArrayPlace",
    "Attention",
    "AttentionSpec",
    "CacheScales",
    "ConfigError",
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "DecoderLayer",
    "ExpertPlace",
    "Experts",
    "ExpertsSpec",
    "FusedLinear",
    "GatedDelta",
    "GatedDeltaSpec",
    "GatedMLP",
    "GatedMLPSpec",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "GptOss",
    "Granite",
    "GroupedQuerySpec",
    "LatentAttention",
    "LatentSpec",
    "LayerSpec",
    "Linear",
    "LinearMaps",
    "LinearPlace",
    "Llama",
    "MLPSpec",
    "Mistral",
    "MixerSpec",
    "Mixtral",
    "Olmo2",
    "Packed",
    "Phi3",
    "Qwen2",
    "Qwen2MoE",
    "Qwen3",
    "Qwen3MoE",
    "Qwen3Next",
    "Qwen35",
    "Qwen35MoE",
    "RMSNorm",
    "Replacement",
    "RopeScaling",
    "SequenceState",
    "SmolLM3",
    "Steer",
    "StepContext",
    "family",
    "llama_layers",
    "trainable",
]
