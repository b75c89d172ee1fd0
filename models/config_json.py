"""Readers of the keys of `config.json` that families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from mpjax.models import config_checks
from mpjax.models.config import ConfigError, RopeScaling
from mpjax.models.config_checks import DTYPES, MAXIMUM_INTEGER
from mpjax.models.rope import yarn_attention_factor

WHERE = "config.json"
ROTARY = f"{WHERE}, rotary scaling"
# More layers than any model has. A config.json alone, without tensors, can't make mpjax build specs
# and shapes for more.
MAXIMUM_LAYERS = 10_000
# Older files have rope_theta and rope_scaling; newer ones put both into rope_parameters. A file
# with both is a newer one to which somebody added rope_scaling, so rope_scaling comes first.
ROTARY_KEYS = ("rope_scaling", "rope_parameters")
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
# Keys in config.json of the fields of DecoderConfig and RopeScaling that have other names there.
NAMES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "stop_ids": "eos_token_id",
    "rope_scaling": "rotary scaling",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
    "fast_turns": "beta_fast",
    "slow_turns": "beta_slow",
    "whole_channels": "truncate",
}


def common_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """DecoderConfig's fields except `layers`: all families read them alike from `config.json`.

    Raises ConfigError for a missing key, an activation other than SiLU, a rotary scaling that is
    not implemented, and a value of a wrong type or outside its range. `Decoder.config_from_hf`
    checks whether the values fit together.
    """
    for key in SWITCHES:
        flag(hf, key)
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"config.json: hidden_act is {activation!r:.80}; only 'silu' is supported"
        )
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    vocabulary = integer(hf, "vocab_size")
    rope_theta, rope_scaling = _rope(hf)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": integer(hf, "num_key_value_heads", heads),
        "head_dim": hidden // heads if hf.get("head_dim") is None else integer(hf, "head_dim"),
        "max_position_embeddings": _positions(hf, rope_scaling),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": _positive(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "dtype": _dtype(hf),
        "stop_ids": _stop_ids(hf, vocabulary),
    }


def field_names(hf: Mapping[str, Any]) -> dict[str, str]:
    """Keys in this config.json of DecoderConfig's fields, for `config_checks.require_sound`."""
    if hf.get("head_dim") is not None:
        return NAMES
    return NAMES | {"head_dim": "head_dim (hidden_size / num_attention_heads)"}


def require(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key], or ConfigError where the key is missing."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json has no {key!r}, which this architecture needs")
    return hf[key]


def integer(
    hf: Mapping[str, Any],
    key: str,
    default: int | None = None,
    minimum: int = 1,
    maximum: int = MAXIMUM_INTEGER,
) -> int:
    """hf[key], an integer from minimum to maximum, or the default where the key is missing.

    Raises ConfigError for another value, and for a missing key without a default.
    """
    value = hf.get(key)
    if value is None:
        value = require(hf, key) if default is None else default
    return config_checks.whole(WHERE, key, value, minimum, maximum)


def flag(hf: Mapping[str, Any], key: str) -> bool:
    """hf[key], a boolean; False where the key is missing. Raises ConfigError for another value."""
    value = hf.get(key)
    return False if value is None else config_checks.switch(WHERE, key, value)


def layer_count(hf: Mapping[str, Any]) -> int:
    """The number of layers, at most MAXIMUM_LAYERS. Raises ConfigError for another value."""
    return integer(hf, "num_hidden_layers", maximum=MAXIMUM_LAYERS)


def sliding_window(hf: Mapping[str, Any], default: int | None = None) -> int | None:
    """The sliding window in keys; None where config.json has null. Raises ConfigError."""
    value = hf.get("sliding_window", default)
    if value is not None and (type(value) is not int or value < 1):
        expected = "a positive integer, or null where there is no window"
        config_checks.refuse(WHERE, "sliding_window", value, expected)
    return value


def _positive(
    values: Mapping[str, Any], key: str, default: float | None = None, where: str = WHERE
) -> float:
    """values[key], a positive number, or the default where the key is missing.

    Raises ConfigError for another value, and for a missing key without a default.
    """
    value: Any = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{where} has no {key!r}: expected a positive number")
    return config_checks.positive(where, key, value)


def number(hf: Mapping[str, Any], key: str, default: float) -> float:
    """hf[key], a positive number, or the default where the key is missing."""
    return float(_positive(hf, key, default))


def layer_windows(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where the file lists them, else the same for all.

    window: the window of layers of type `sliding_attention`. Raises ConfigError for a list of
    another length, and for other types of layers.
    """
    layers = layer_count(hf)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = hf.get("layer_types") or [usual] * layers
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in [*known] for k in kinds):
        raise ConfigError(
            f"config.json: layer_types must list {layers} of {sorted(known)}, got {kinds!r:.80}"
        )
    return tuple(known[kind] for kind in kinds)


def _dtype(hf: Mapping[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: dtype {name!r:.80} is not supported: expected bfloat16, float16 or "
            "float32"
        )
    return jnp.dtype(name).name


def _stop_ids(hf: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    found = hf.get("eos_token_id")
    return (
        () if found is None else config_checks.token_ids(WHERE, "eos_token_id", found, vocabulary)
    )


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    added, newer = (_rotary_object(hf, key) for key in ROTARY_KEYS)
    for values in (hf, added, newer):
        if (partial := values.get("partial_rotary_factor")) not in (None, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor is {partial}; only whole heads are supported"
            )
    places = (added, hf, newer) if added else (newer, hf)
    given = next((values for values in places if values.get("rope_theta") is not None), hf)
    theta = float(_positive(given, "rope_theta", 1e4))
    parameters = added or newer
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    factor = float(_positive(parameters, "factor", where=ROTARY))
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    if kind == "yarn":
        return theta, _yarn(hf, parameters, factor)
    low, high, context = (
        _positive(parameters, key, where=ROTARY)
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    return theta, RopeScaling(kind, factor, float(low), float(high), int(context))


def _yarn(hf: Mapping[str, Any], parameters: Mapping[str, Any], factor: float) -> RopeScaling:
    """YaRN's scaling; a file without the original context means its max_position_embeddings."""
    context = integer(hf, "max_position_embeddings", 2048)
    attention, fast, slow, original = (
        float(_positive(parameters, key, default, where=ROTARY))
        for key, default in (
            ("attention_factor", yarn_attention_factor(factor)),
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("original_max_position_embeddings", context),
        )
    )
    for key in ("mscale", "mscale_all_dim"):  # of DeepSeek
        if parameters.get(key) is not None:
            raise ConfigError(f"{ROTARY}: {key} is not supported: expected a file without it")
    whole = parameters.get("truncate") is None or flag(parameters, "truncate")
    return RopeScaling(
        "yarn",
        factor,
        original_context=int(original),
        attention_factor=attention,
        fast_turns=fast,
        slow_turns=slow,
        whole_channels=whole,
    )


def _rotary_object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object hf[key], empty where it is missing: rotary scaling as `_rope` reads it.

    Raises ConfigError for anything but an object, and for a kind of scaling not implemented here.
    """
    written = hf.get(key) or {}
    if not isinstance(written, Mapping):
        raise ConfigError(f"config.json: {key} is {written!r}: expected an object")
    if any(isinstance(value, Mapping) for value in written.values()):
        raise ConfigError(
            f"config.json: {key} holds an object for each kind of layer, which is not supported: "
            "expected one object for all layers"
        )
    kinds = [kind for name in ("rope_type", "type") if (kind := written.get(name)) is not None]
    for kind in kinds:
        if kind not in ROTARY_KINDS:
            raise ConfigError(
                f"config.json: rotary scaling {kind!r} is not supported: "
                f"expected {', '.join(ROTARY_KINDS)}"
            )
    if not kinds and written.get("factor") is not None:
        raise ConfigError(
            f"config.json: {key} has a factor and no rope_type: expected {', '.join(ROTARY_KINDS)}"
        )
    return written


def _positions(hf: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """The number of positions of a model, after its rotary scaling.

    With linear scaling, `max_position_embeddings` counts the positions before scaling, as Hugging
    Face's documentation asks for, unless `original_max_position_embeddings` stands beside the
    factor; the result is `factor` times that. With other kinds, and without scaling,
    `max_position_embeddings` is the result.
    """
    written = integer(hf, "max_position_embeddings", 2048)
    if scaling is None or scaling.kind != "linear":
        return written
    parameters = next(values for key in ROTARY_KEYS if (values := hf.get(key)))
    before, key = float(written), "original_max_position_embeddings"
    if parameters.get(key) is not None:
        before = _positive(parameters, key, where=ROTARY)
    if not scaling.factor * before <= MAXIMUM_INTEGER:
        raise ConfigError(
            f"config.json: rotary scaling makes {scaling.factor} times {before:.0f} positions: "
            f"expected at most {MAXIMUM_INTEGER}"
        )
    return max(written, int(scaling.factor * before))
