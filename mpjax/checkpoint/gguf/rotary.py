"""Converts a GGUF file's description of the rotary embedding to keys of config.json."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf.architecture import Architecture
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.models.rotary import yarn_attention_factor

# Settings of Llama 3.1 and later. Files hold only the resulting divisors of frequencies.
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)
LLAMA3_CONTEXT, LOW, HIGH = 8192, 1.0, (4.0, 1.0)  # 1 in Llama 4 Scout

LLAMA3 = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (LLAMA3, SHORT, LONG)  # tensors of divisors of frequencies


OF_PHIMOE = "short_mscale", "long_mscale"  # PhiMoE's keys of the factor of attention
KINDS = ("none", "linear", "yarn", "longrope")


def read(
    metadata: Metadata, architecture: Architecture, factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The keys `rope_theta` and, with RoPE scaling, `rope_scaling`.

    factors: float32 arrays by names in FACTORS. Raises CheckpointError for an unsupported kind of
    scaling, and for combined kinds.
    """
    name = metadata.text("general.architecture")
    prefix = f"{name}.rope"
    if name == "gemma4":
        return _proportional(metadata, prefix, factors)
    theta = metadata.number(f"{prefix}.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    kind, factor = _kind(metadata, prefix)
    context = metadata.whole(f"{prefix}.scaling.original_context_length", None)
    turns = {
        key: metadata.number(f"{prefix}.scaling.yarn_{key}", None)
        for key in ("beta_fast", "beta_slow")
    }
    if factors or kind == "longrope":
        if kind == "yarn" or factor != 1:
            raise CheckpointError(
                f"{metadata.path} has {', '.join(factors)} and {prefix}.scaling.factor {factor} "
                f"({kind}): expected one kind of scaling; load the model's safetensors checkpoint"
            )
        if LLAMA3 not in factors:
            return found | _longrope(metadata, name, factors)
    attention = _attention(metadata, prefix, kind)
    if LLAMA3 in factors:
        return found | {"rope_scaling": _llama3(metadata, theta, factors)}
    if kind != "yarn" and factor == 1:
        return found
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _growth(metadata, architecture, context, attention)
        _drop_usual_attention(metadata, prefix, factor)
    optional = {
        "original_max_position_embeddings": context,
        "attention_factor": None if attention == 1 else attention * yarn_attention_factor(factor),
        **(turns if kind == "yarn" else {}),
        # gpt-oss doesn't round YaRN's bounds to whole channels, which GGUF files don't say.
        "truncate": False if kind == "yarn" and name == "gpt-oss" else None,
    }
    scaling |= {key: value for key, value in optional.items() if value is not None}
    if name == "phimoe":
        scaling |= dict.fromkeys(OF_PHIMOE, scaling.get("attention_factor", 1.0))
    return found | {"rope_scaling": scaling}


def _growth(
    metadata: Metadata, architecture: Architecture, context: int | None, attention: float
) -> dict[str, float]:
    """YaRN's keys of the growth of scores, in architectures that have them.

    context, attention: `original_context_length` and `attn_factor`. As in llama.cpp, `mscale` is 1
    or, in `deepseek2`, equal to `mscale_all_dim`. Raises CheckpointError if a file with latents has
    no multiplier, which all models with YaRN have, and for keys that can't be combined.
    """
    name, found = metadata.text("general.architecture"), dict[str, float]()
    if (unit := architecture.yarn_unit) is not None:
        key = f"{name}.rope.scaling.yarn_log_multiplier"
        growth = metadata.number(key, ... if architecture.is_latent else 0.0)
        if (share := float(f"{growth * unit:.6g}")) and attention != 1:
            raise CheckpointError(
                f"{metadata.path}: {name}.rope.scaling.attn_factor is {attention}: expected 1 "
                f"beside {key}"
            )
        if share:
            found = {"mscale": share if name == "deepseek2" else 1.0, "mscale_all_dim": share}
    if not architecture.grows:
        return found
    key = f"{name}.attention.temperature_length"
    if (length := metadata.whole(key, 0)) not in (0, context):
        raise CheckpointError(
            f"{metadata.path}: {key} is {length}: expected {context}, as in "
            f"{name}.rope.scaling.original_context_length"
        )
    scale = metadata.number(f"{name}.attention.temperature_scale", 0.0)
    return found | {"llama_4_scaling_beta": scale} if scale or architecture.is_latent else found


def _drop_usual_attention(metadata: Metadata, prefix: str, factor: float) -> None:
    """Marks yarn_attn_factor as known if it is YaRN's own factor, which is the default."""
    key = f"{prefix}.scaling.yarn_attn_factor"
    given = metadata.values.get(key)
    if isinstance(given, float) and np.isclose(given, yarn_attention_factor(factor), rtol=1e-4):
        metadata.number(key)


def _kind(metadata: Metadata, prefix: str) -> tuple[str, float]:
    """The kind of RoPE scaling, and the factor by which it extends the context.

    As in llama.cpp, the default kind is `linear`, an older key of the factor is used if the newer
    one is missing, and factor 0 stands for 1.
    """
    key = f"{prefix}.scaling.type"
    kind = metadata.text(key, "linear")
    if kind not in KINDS:
        expected = ", ".join(KINDS)
        raise CheckpointError(f"{metadata.path}: {key} is {kind!r:.80}: expected {expected}")
    _require_plain_yarn(metadata, prefix, kind)
    older = metadata.number(f"{prefix}.scale_linear", 0)
    factor = float(metadata.number(f"{prefix}.scaling.factor", older)) or 1.0
    return kind, 1.0 if kind == "none" else factor


def _attention(metadata: Metadata, prefix: str, kind: str) -> float:
    """An attention factor on top of YaRN's own."""
    key = f"{prefix}.scaling.attn_factor"
    factor = float(metadata.number(key, 1.0))
    if factor != 1 and kind != "yarn":
        raise CheckpointError(
            f"{metadata.path}: {key} is {factor}: expected 1 without YaRN or LongRoPE"
        )
    return factor


def _require_plain_yarn(metadata: Metadata, prefix: str, kind: str) -> None:
    """Raises CheckpointError unless yarn_ext_factor is 1 with YaRN and 0 otherwise."""
    key, expected = f"{prefix}.scaling.yarn_ext_factor", float(kind == "yarn")
    share = metadata.number(key, -1)  # below 0 means the default of the kind
    if share >= 0 and share != expected:
        raise CheckpointError(f"{metadata.path}: {key} is {share}: expected {expected} with {kind}")


def _longrope(metadata: Metadata, name: str, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    if {*factors} != {SHORT, LONG}:
        raise CheckpointError(
            f"{metadata.path} has {' and '.join(factors) or 'no factors'} of LongRoPE: expected "
            f"{SHORT} and {LONG}"
        )
    context = metadata.whole(f"{name}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": factors[SHORT].tolist(),
        "long_factor": factors[LONG].tolist(),
    }
    attention = metadata.number(f"{name}.rope.scaling.attn_factor", None)
    if attention is not None:
        scaling["attention_factor"] = attention
    if name == "phimoe":
        scaling |= dict.fromkeys(OF_PHIMOE, scaling.pop("attention_factor", 1.0))
        scaling["original_max_position_embeddings"] = context
    return {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _proportional(
    metadata: Metadata, prefix: str, factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Gemma 4's `rope_parameters`: in full attention, only the pairs with the divisor 1 turn."""
    thetas = [metadata.number(f"{prefix}.freq_base{end}", 10000.0) for end in ("", "_swa")]
    for key in ("beta_fast", "beta_slow"):  # known: they count with YaRN alone
        metadata.number(f"{prefix}.scaling.yarn_{key}", None)
    given = factors.get(LLAMA3, np.ones(1, np.float32))
    turned = int((given == 1).sum())
    if {*factors} - {LLAMA3} or not (given[:turned] == 1).all() or (given[turned:] < 1e20).any():
        raise CheckpointError(
            f"{metadata.path} has {' and '.join(factors)}: expected {LLAMA3} of ones, for the pairs"
            " that turn, and then of numbers that stop the others, such as 1e30"
        )
    whole = {"rope_type": "proportional", "partial_rotary_factor": turned / len(given)}
    local = {"rope_type": "default", "rope_theta": thetas[1]}
    kinds = {"full_attention": whole | {"rope_theta": thetas[0]}, "sliding_attention": local}
    return {"rope_parameters": kinds}


def _llama3(metadata: Metadata, theta: float, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Llama 3.1's `rope_scaling` that gives these factors. Raises CheckpointError if none does."""
    if {*given} != {LLAMA3}:
        raise CheckpointError(
            f"{metadata.path} has {' and '.join(given)}: expected one kind of rotary factors"
        )
    factors = given[LLAMA3]
    dim = 2 * len(factors)
    frequencies = theta ** -(np.arange(0, dim, 2) / dim)
    turns = LLAMA3_CONTEXT * frequencies / (2 * np.pi)
    for factor, high in itertools.product(LLAMA3_FACTORS, HIGH):
        with np.errstate(divide="ignore"):  # with equal bounds, shares are 0 or 1
            share = np.clip((turns - LOW) / (high - LOW), 0, 1)
        if np.allclose(factors, 1 / (share + (1 - share) / factor), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": LLAMA3_CONTEXT,
            }
    raise CheckpointError(
        f"{metadata.path}: rope_freqs.weight divides the rotary frequencies by {factors[0]:.3g} to "
        f"{factors[-1]:.3g}, as no Llama 3 does: load the model's safetensors checkpoint"
    )
