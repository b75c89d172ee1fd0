"""Checks an architecture's metadata keys that no reader uses: irrelevant, neutral, or refused.

Source: llama.cpp, gguf-py/gguf/constants.py, src/llama-model.cpp and src/llama-graph.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

# Keys that don't affect logits, or sizes that the tensors' shapes determine.
IRRELEVANT = (
    *("vocab_size", "tensor_data_layout", "pooling_type"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    *("rope.scaling.finetuned", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
# Neutral values of keys for computations that the decoders here don't have.
_ZERO = (
    *("use_parallel_residual", "leading_dense_block_count", "nextn_predict_layers"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
    *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.shared_kv_layers"),
    *("attention.scale", "attention.sliding_window", "attention.temperature_length"),
    *("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    *("expert_used_count", "expert_shared_count"),
)
_ZERO_OR_ONE = (
    *("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale"),
    *("expert_weights_scale", "expert_gating_func", "expert_group_count"),
    *("expert_group_used_count", "interleave_moe_layer_step", "moe_every_n_layers"),
    "rope.scaling.alpha",
)
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_ZERO_OR_ONE, (0, 1)),
    **{"attention.causal": (True,), "expert_weights_norm": (True,)},
    "rope.scaling.yarn_attn_factor": (1,),
}


def require_known(metadata: Metadata, prefix: str) -> None:
    """Raises CheckpointError for an unused key with a value that isn't neutral.

    prefix: of the architecture's keys, without the dot.
    """
    for key, value in metadata.values.items():
        own = key.removeprefix(f"{prefix}.")
        if own == key or key in metadata.taken or own in IRRELEVANT:
            continue
        neutral = NEUTRAL.get(own, ())
        if isinstance(value, int | float) and value in neutral:
            continue
        expected = " or ".join(map(str, neutral)) or "a file without it"
        raise CheckpointError(
            f"{metadata.path}: {key!r} is {value!r:.80}, which is not supported in this "
            f"architecture: expected {expected}; load the model's safetensors checkpoint"
        )
