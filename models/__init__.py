"""Decoders as Flax NNX modules, with weights and KV caches in any precision."""

from mpjax.models.attention import Attention
from mpjax.models.config import ConfigError, DecoderConfig, RopeScaling
from mpjax.models.decoder import CacheScales, Decoder, DecoderLayer
from mpjax.models.layers import FusedLinear, GatedMLP, Linear, Packed, RMSNorm
from mpjax.models.llama import Llama
from mpjax.models.mistral import Mistral
from mpjax.models.qwen import Qwen2, Qwen3
from mpjax.models.registry import FAMILIES, family
from mpjax.models.trainable import trainable

__all__ = [
    "FAMILIES",
    "Attention",
    "CacheScales",
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "FusedLinear",
    "GatedMLP",
    "Linear",
    "Llama",
    "Mistral",
    "Packed",
    "Qwen2",
    "Qwen3",
    "RMSNorm",
    "RopeScaling",
    "family",
    "trainable",
]
