"""Configurations of published models, for benchmarks and examples without a checkpoint."""

from __future__ import annotations

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, RopeScaling
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.gated_delta import GatedDeltaSpec
from mpjax.models.gpt_oss import GptOss
from mpjax.models.llama import Llama, llama_layers
from mpjax.models.mixtral import Mixtral
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.qwen import Qwen3
from mpjax.models.qwen_hybrid import Qwen35, Qwen35MoE
from mpjax.models.qwen_moe import Qwen3MoE
from mpjax.models.rotary import yarn_attention_factor

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

QWEN3_30B_A3B = DecoderConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    layers=(
        LayerSpec(
            GroupedQuerySpec(qk_norm=True), ExpertsSpec(768, num_experts=128, experts_per_token=8)
        ),
    )
    * 48,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    stop_ids=(151645,),
)

MIXTRAL_8X7B = DecoderConfig(
    vocab_size=32000,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerSpec(GroupedQuerySpec(), ExpertsSpec(14336, num_experts=8, experts_per_token=2)),)
    * 32,
    max_position_embeddings=32768,
    rope_theta=1e6,
    stop_ids=(2,),
)

_GPT_OSS_EXPERTS = ExpertsSpec(
    2880,
    num_experts=32,
    experts_per_token=4,
    router_bias=True,
    bias=True,
    gate_limit=7.0,
    gate_alpha=1.702,
    joint_files=True,
)

GPT_OSS_20B = DecoderConfig(
    vocab_size=201088,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    layers=tuple(
        LayerSpec(
            GroupedQuerySpec(window, qkv_bias=True, output_bias=True, sinks=True), _GPT_OSS_EXPERTS
        )
        for window in (128, None)
    )
    * 12,
    max_position_embeddings=131072,
    rope_theta=150000.0,
    rope_scaling=RopeScaling(
        "yarn",
        32.0,
        original_context=4096,
        attention_factor=yarn_attention_factor(32.0),
        whole_channels=False,
    ),
    stop_ids=(200002,),
)

_GATED_ATTENTION = GroupedQuerySpec(qk_norm=True, output_gate=True)

QWEN3_6_27B = DecoderConfig(
    vocab_size=248320,
    hidden_size=5120,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    layers=tuple(
        LayerSpec(mixer, GatedMLPSpec(17408))
        for mixer in (GatedDeltaSpec(16, 48),) * 3 + (_GATED_ATTENTION,)
    )
    * 16,
    max_position_embeddings=262144,
    rope_theta=1e7,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    offset_norms=True,
    stop_ids=(248046,),
)

QWEN3_6_35B_A3B = DecoderConfig(
    vocab_size=248320,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    layers=tuple(
        LayerSpec(
            mixer,
            ExpertsSpec(
                512, num_experts=256, experts_per_token=8, shared_size=512, shared_gate=True
            ),
        )
        for mixer in (GatedDeltaSpec(16, 32),) * 3 + (_GATED_ATTENTION,)
    )
    * 10,
    max_position_embeddings=262144,
    rope_theta=1e7,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    offset_norms=True,
    stop_ids=(248046,),
)

# Name in commands → class and configuration of the model.
PUBLISHED: dict[str, tuple[type[Decoder], DecoderConfig]] = {
    "qwen3-8b": (Qwen3, QWEN3_8B),
    "llama3.1-8b": (Llama, LLAMA3_1_8B),
    "llama3-70b": (Llama, LLAMA3_70B),
    "qwen3-30b-a3b": (Qwen3MoE, QWEN3_30B_A3B),
    "mixtral-8x7b": (Mixtral, MIXTRAL_8X7B),
    "gpt-oss-20b": (GptOss, GPT_OSS_20B),
    "qwen3.6-27b": (Qwen35, QWEN3_6_27B),
    "qwen3.6-35b-a3b": (Qwen35MoE, QWEN3_6_35B_A3B),
}


def published(name: str) -> tuple[type[Decoder], DecoderConfig]:
    """The class and the configuration of a model. Raises ValueError for an unknown name."""
    if name not in PUBLISHED:
        raise ValueError(f"unknown shapes {name!r:.80}: expected one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
