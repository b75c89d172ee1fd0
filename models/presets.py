"""Configurations of published models, for benchmarks and examples without a checkpoint."""

from __future__ import annotations

from mpjax.models.config import DecoderConfig, RopeScaling
from mpjax.models.llama import llama_layers

QWEN3_8B = DecoderConfig(
    vocab_size=151936,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=llama_layers((None,) * 36, 12288, qk_norm=True),
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    stop_ids=(151645,),
)

LLAMA3_70B = DecoderConfig(
    vocab_size=128256,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    layers=llama_layers((None,) * 80, 28672),
    max_position_embeddings=8192,
    rope_theta=5e5,
    stop_ids=(128001, 128009),
)

LLAMA3_1_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=llama_layers((None,) * 32, 14336),
    max_position_embeddings=131072,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", factor=8.0),
    stop_ids=(128001, 128008, 128009),
)
