"""Defaults of config.json's optional keys, and keys of which few values are supported.

Families state their differences from these. The values are those of transformers' configuration
classes. A key that is neither here nor known to a family is ignored, as transformers ignores it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any

from mpjax.models import config_checks

WHERE = "config.json"
INSTEAD = "mpjax.embed gives embeddings of texts, and mpjax.score the scores of a classifier"
DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = types.MappingProxyType({"per_layer_config": (None, {})})
# Keys in which null has a meaning; in all other keys null stands for the default.
NULLABLE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    *(
        "eos_token_id",
        "num_key_value_heads",
        "attention_chunk_size",
        "mamba_d_ssm",
        "q_lora_rank",
        "block_ffn_dim_multiplier",
    ),
)


def complete(
    hf: Mapping[str, Any],
    defaults: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    aliases: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """The keys of a config.json, with defaults for those that it leaves out.

    defaults: of the family, which override DEFAULTS. A default of `eos_token_id` counts only if the
        vocabulary has that token.
    neutral: by key, the only values that the family's decoder supports; () if the family reads the
        key itself.
    aliases: alternative key → the key that it replaces, over which it has precedence.

    Raises ConfigError for a key whose value is not among its neutral ones.
    """
    for key, supported in {**NEUTRAL, **neutral}.items():
        if supported and (value := hf.get(key)) not in supported:
            expected = " or ".join(json.dumps(one) for one in supported)
            config_checks.refuse(WHERE, key, value, f"{expected}, since no other is supported")
    hf = {**hf, **{name: hf[key] for key, name in aliases.items() if hf.get(key) is not None}}
    written = {key: value for key, value in hf.items() if value is not None or key in NULLABLE}
    found = {**DEFAULTS, **defaults, **written}
    vocabulary, stop = found.get("vocab_size"), defaults.get("eos_token_id") or 0
    last = max(stop) if isinstance(stop, list) else stop
    if "eos_token_id" not in written and type(vocabulary) is int and last >= vocabulary:
        found.pop("eos_token_id", None)
    return found
