"""Decoders as Flax NNX modules, with weights and KV caches in any precision."""

from models.attention import Attention
from models.config import ConfigError, DecoderConfig, RopeScaling
from models.decoder import CacheScales, Decoder, DecoderLayer
from models.layers import FusedLinear, GatedMLP, Linear, RMSNorm
from models.llama import Llama
from models.mistral import Mistral
from models.qwen import Qwen2, Qwen3
from models.registry import FAMILIES, family

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
    "Qwen2",
    "Qwen3",
    "RMSNorm",
    "RopeScaling",
    "family",
]
