"""Converts a GGUF file's description of the rotary embedding to keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

# The settings of published models of Llama 3.1 and later: files hold only the factors by which
# frequencies are divided, which follow from these.
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
LLAMA3_CONTEXT, LOW, HIGH = 8192, 1.0, 4.0

LLAMA3 = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (LLAMA3, SHORT, LONG)  # tensors of numbers by which frequencies are divided


def read(metadata: Metadata, name: str, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """`rope_theta`, and `rope_scaling` if there is any.

    name: of the architecture. factors: float32 arrays by the names in FACTORS. Raises
    CheckpointError for a kind of scaling that is not read.
    """
    theta = metadata.number(f"{name}.rope.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    if SHORT in factors and LONG in factors:
        return found | _longrope(metadata, name, factors)
    if LLAMA3 in factors:
        return found | {"rope_scaling": _llama3(metadata, theta, factors[LLAMA3])}
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{metadata.path}: {name}.rope.scaling.type is {kind!r:.80}: expected none, linear or "
            "yarn"
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": metadata.number(f"{name}.rope.scaling.factor"),
    }
    context = metadata.whole(f"{name}.rope.scaling.original_context_length", None)
    if context is not None:
        scaling["original_max_position_embeddings"] = context
    return found | {"rope_scaling": scaling}


def _longrope(metadata: Metadata, name: str, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    context = metadata.whole(f"{name}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": factors[SHORT].tolist(),
        "long_factor": factors[LONG].tolist(),
    }
    attention = metadata.number(f"{name}.rope.scaling.attn_factor", None)
    if attention is not None:
        scaling["attention_factor"] = attention
    return {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _llama3(metadata: Metadata, theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3.1's scaling, if it is the one that makes these factors."""
    dim = 2 * len(factors)
    frequencies = theta ** -(np.arange(0, dim, 2) / dim)
    turns = LLAMA3_CONTEXT * frequencies / (2 * np.pi)
    share = np.clip((turns - LOW) / (HIGH - LOW), 0, 1)
    for factor in LLAMA3_FACTORS:
        if np.allclose(factors, 1 / (share + (1 - share) / factor), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": LLAMA3_CONTEXT,
            }
    raise CheckpointError(
        f"{metadata.path}: rope_freqs.weight divides the rotary frequencies by {factors[0]:.3g} to "
        f"{factors[-1]:.3g}, as no Llama 3 does: load the model's safetensors checkpoint"
    )
