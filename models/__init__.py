"""Decoders as Flax NNX modules, with weights and KV caches in any precision."""

from mpjax.models.attention import Attention, GroupedQuerySpec
from mpjax.models.config import (
    AttentionSpec,
    ConfigError,
    DecoderConfig,
    LayerSpec,
    LinearMaps,
    MLPSpec,
    RopeScaling,
)
from mpjax.models.decoder import CacheScales, Decoder, DecoderLayer
from mpjax.models.layers import FusedLinear, Linear, Packed, RMSNorm
from mpjax.models.llama import Llama, llama_layers
from mpjax.models.mistral import Mistral
from mpjax.models.mlp import GatedMLP, GatedMLPSpec
from mpjax.models.parameters import ArrayPlace, LinearPlace
from mpjax.models.qwen import Qwen2, Qwen3
from mpjax.models.registry import FAMILIES, family
from mpjax.models.trainable import trainable

__all__ = [
    "FAMILIES",
    "ArrayPlace",
    "Attention",
    "AttentionSpec",
    "CacheScales",
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "FusedLinear",
    "GatedMLP",
    "GatedMLPSpec",
    "GroupedQuerySpec",
    "LayerSpec",
    "Linear",
    "LinearMaps",
    "LinearPlace",
    "Llama",
    "MLPSpec",
    "Mistral",
    "Packed",
    "Qwen2",
    "Qwen3",
    "RMSNorm",
    "RopeScaling",
    "family",
    "llama_layers",
    "trainable",
]
