"""Readers of the keys of `config.json` that families share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from mpjax.models import config_checks
from mpjax.models.config import ConfigError, RopeScaling
from mpjax.models.config_checks import DTYPES, MAXIMUM_INTEGER
from mpjax.models.config_keys import WHERE
from mpjax.models.rotary import yarn_attention_factor

ROTARY = f"{WHERE}, rotary scaling"
# Older files have rope_theta and rope_scaling; newer ones put both into rope_parameters. A file
# with both is a newer one to which somebody added rope_scaling, so rope_scaling has precedence.
ROTARY_KEYS = ("rope_scaling", "rope_parameters")
KINDS = ("full_attention", "sliding_attention")  # of layers
ORIGINAL = "original_max_position_embeddings"
# Kind of rotary scaling in a file → its name here. Phi-3's first files call LongRoPE `su`.
SCALINGS = {kind: kind for kind in config_checks.ROPE_SCALINGS} | {"su": "longrope"}
# More layers than any model has: bounds the specs and shapes that a bad config.json makes mpjax
# build.
MAXIMUM_LAYERS = 10_000
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
# Fields of DecoderConfig and RopeScaling → their keys in config.json, where the names differ.
NAMES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "stop_ids": "eos_token_id",
    "rope_scaling": "rotary scaling",
    "local_rope_scaling": "rope_parameters of sliding_attention",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
    "fast_turns": "beta_fast",
    "slow_turns": "beta_slow",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "rotary_dim": "partial_rotary_factor (times head_dim)",
    "whole_channels": "truncate",
    "rotated_share": "partial_rotary_factor",
    "per_layer_vocab": "vocab_size_per_layer_input",
}


def common_fields(
    hf: Mapping[str, Any],
    *,
    activation: str = "silu",
    partial_rotary: bool = False,
    theta: float = 1e4,
    epsilon: str = "rms_norm_eps",
) -> dict[str, Any]:
    """DecoderConfig's fields, except `layers`, that all families read alike from `config.json`.

    hf: with defaults for the keys that the file leaves out; see `config_keys.complete`.
    activation: of the family's MLPs, as files name it. partial_rotary: whether the family supports
    partial RoPE. theta: the default of `rope_theta`. epsilon: the key of the norms' epsilon.

    Raises ConfigError for a missing key, another activation, a rotary scaling that is not
    implemented, and a value of a wrong type or outside its range. `Decoder.config_from_hf`
    checks whether the values fit together.
    """
    for key in SWITCHES:
        flag(hf, key)
    if (found := hf["hidden_act"]) != activation:
        raise ConfigError(
            f"config.json: hidden_act is {found!r:.80}; only {activation!r} is supported"
        )
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    vocabulary = integer(hf, "vocab_size")
    head_dim = hidden // heads if hf.get("head_dim") is None else integer(hf, "head_dim")
    rope_theta, rope_scaling = rotary(hf, theta)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": integer(hf, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": _rotary_dim(hf, head_dim, rope_scaling, is_allowed=partial_rotary),
        "max_position_embeddings": _positions(hf, rope_scaling),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": number(hf, epsilon),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "dtype": _dtype(hf),
        "stop_ids": _stop_ids(hf, vocabulary),
    }


def field_names(hf: Mapping[str, Any]) -> dict[str, str]:
    """DecoderConfig's fields → their keys in this file, for `config_checks.require_sound`."""
    if hf.get("head_dim") is not None:
        return NAMES
    return NAMES | {"head_dim": "head_dim (hidden_size / num_attention_heads)"}


def require(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key]. Raises ConfigError if the key is missing."""
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
    """hf[key], an integer from minimum to maximum, or the default if the key is missing.

    Raises ConfigError for any other value, and for a missing key without a default.
    """
    value = hf.get(key)
    if value is None:
        value = require(hf, key) if default is None else default
    return config_checks.whole(WHERE, key, value, minimum, maximum)


def flag(hf: Mapping[str, Any], key: str) -> bool:
    """hf[key], a boolean; False if the key is missing. Raises ConfigError for any other value."""
    value = hf.get(key)
    return False if value is None else config_checks.switch(WHERE, key, value)


def layer_count(hf: Mapping[str, Any]) -> int:
    """The number of layers. Raises ConfigError unless it is from 1 to MAXIMUM_LAYERS."""
    return integer(hf, "num_hidden_layers", maximum=MAXIMUM_LAYERS)


def expert_count(hf: Mapping[str, Any]) -> int:
    """The number of experts, for which files use one of two keys. Raises ConfigError.

    Defaults use the second key, so that the first one takes precedence if a file has it.
    """
    return integer(hf, "num_local_experts" if hf.get("num_experts") is None else "num_experts")


def sliding_window(hf: Mapping[str, Any]) -> int | None:
    """The sliding window in keys; None if it is missing or null. Raises ConfigError."""
    value = hf.get("sliding_window")
    if value is not None and (type(value) is not int or value < 1):
        expected = "a positive integer, or null where there is no window"
        config_checks.refuse(WHERE, "sliding_window", value, expected)
    return value


def number(
    values: Mapping[str, Any], key: str, default: float | None = None, where: str = WHERE
) -> float:
    """values[key], a positive number, or the default if the key is missing.

    Raises ConfigError for any other value, and for a missing key without a default.
    """
    value: Any = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{where} has no {key!r}: expected a positive number")
    return config_checks.positive(where, key, value)


def optional(hf: Mapping[str, Any], key: str) -> float | None:
    """hf[key], a positive number; None if it is missing or null. Raises ConfigError."""
    return None if hf.get(key) is None else number(hf, key)


def layer_windows(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` if the file has that list, else the same for all.

    window: the window of layers of type `sliding_attention`. Raises ConfigError for a list of
    another length, and for other types of layers.
    """
    layers = layer_count(hf)
    usual = "full_attention" if window is None else "sliding_attention"
    known = {"sliding_attention": window, "full_attention": None}
    kinds = layer_kinds({**hf, "layer_types": hf.get("layer_types") or [usual] * layers}, known)
    return tuple(known[kind] for kind in kinds)


def layer_kinds(hf: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """`layer_types`, the kind of each layer. Raises ConfigError for a kind outside `known`.

    known: the kinds that the family has.
    """
    layers, kinds = layer_count(hf), require(hf, "layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in [*known] for k in kinds):
        raise ConfigError(
            f"config.json: layer_types must list {layers} of {sorted(known)}, got {kinds!r:.80}"
        )
    return kinds


def patterned_kinds(hf: Mapping[str, Any], every: int) -> list[str]:
    """The kind of each layer, of KINDS: full attention in every n-th, unless there is a list."""
    usual = [KINDS[(i + 1) % every != 0] for i in range(layer_count(hf))]
    return layer_kinds({**hf, "layer_types": hf.get("layer_types") or usual}, KINDS)


def shared_keys(hf: Mapping[str, Any], kinds: list[str]) -> list[int | None]:
    """The distance back to the layer whose keys and values each layer reads; None for its own.

    The last `num_kv_shared_layers` layers read those of the last layer before them that is of their
    kind. Raises ConfigError if there is none.
    """
    shared, count = integer(hf, "num_kv_shared_layers", 0, minimum=0), len(kinds)
    own = kinds[: max(count - shared, 0)]
    if {*own} != {*kinds}:
        expected = f"so few of {count} layers that each kind of layer is among the others"
        config_checks.refuse(WHERE, "num_kv_shared_layers", shared, expected)
    last = {kind: max(i for i, each in enumerate(own) if each == kind) for kind in own}
    return [None if i < len(own) else i - last[kind] for i, kind in enumerate(kinds)]


def layer_numbers(hf: Mapping[str, Any], key: str) -> list[int]:
    """hf[key], indices of layers; [] if the key is missing. Raises ConfigError for other values."""
    count, listed = layer_count(hf), hf.get(key) or []
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        config_checks.refuse(WHERE, key, listed, f"a list of layers from 0 to {count - 1}")
    return listed


def patterned_windows(hf: Mapping[str, Any], every: int | None = None) -> tuple[int | None, ...]:
    """The window of each layer: none in every n-th, unless the file has `layer_types`.

    every: n; None for the file's `sliding_window_pattern`. Raises ConfigError.
    """
    window = sliding_window(hf)
    if hf.get("layer_types"):
        return layer_windows(hf, window)
    every = integer(hf, "sliding_window_pattern") if every is None else every
    return tuple(None if (i + 1) % every == 0 else window for i in range(layer_count(hf)))


def later_windows(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer: from layer `max_window_layers` on, or by `layer_types` if given."""
    if hf.get("layer_types"):
        return layer_windows(hf, window)
    full = integer(hf, "max_window_layers", minimum=0)
    return tuple(None if layer < full else window for layer in range(layer_count(hf)))


def grouped_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the ExpertsSpec of a DeepSeek-V3 router: sigmoid scores, a selection bias, groups.

    The `n_shared_experts` become one shared expert of their total size.
    """
    inner, groups = integer(hf, "moe_intermediate_size"), integer(hf, "n_group")
    best = integer(hf, "topk_group")
    found: dict[str, Any] = {} if groups == 1 == best else {"groups": groups}
    return {
        **(found and found | {"groups_per_token": best, "group_score": "top_two"}),
        "intermediate_size": inner,
        "num_experts": integer(hf, "n_routed_experts"),
        "experts_per_token": integer(hf, "num_experts_per_tok"),
        "scoring": "sigmoid",
        "renormalize": flag(hf, "norm_topk_prob"),
        "scale": number(hf, "routed_scaling_factor"),
        "router_correction": True,
        "shared_size": integer(hf, "n_shared_experts", minimum=0) * inner or None,
    }


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


def rotary(hf: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """The theta and the scaling of the rotary embedding. Raises ConfigError.

    theta: the default.
    """
    places = _rotary_places(hf)
    given = next((values for values in places if values.get("rope_theta") is not None), hf)
    theta = float(number(given, "rope_theta", theta))
    return theta, _scaling(hf, places[0])


def ropes_by_kind(hf: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each kind of layer in KINDS, the file's keys with the rotary keys of that kind alone.

    Newer files have an object for each kind in `rope_parameters`. In older ones, `rope_scaling` and
    `rope_theta` belong to full attention, and `rope_local_base_freq` is the theta of sliding
    windows.
    """
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not {*nested} <= {*KINDS}:
        expected = f"an object for each kind of layer: {' and '.join(KINDS)}"
        config_checks.refuse(WHERE, "rope_parameters", nested, expected)
    added = dict(zip(KINDS, (hf.get("rope_scaling"), None), strict=True))
    thetas = dict(zip(KINDS, (hf.get("rope_theta"), hf.get("rope_local_base_freq")), strict=True))
    return [
        {
            **{key: value for key, value in hf.items() if key != ORIGINAL},
            "rope_parameters": nested.get(kind),
            "rope_scaling": added[kind],
            "rope_theta": thetas[kind],
        }
        for kind in KINDS
    ]


def _rotary_places(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The objects in which rotary keys may be, in order of precedence.

    The first one has the kind of scaling and its parameters.
    """
    added, newer = (_rotary_object(hf, key) for key in ROTARY_KEYS)
    return (added, hf, newer) if added else (newer, hf)


def rotary_object(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the kind of rotary scaling and its parameters. Raises ConfigError."""
    added, newer = (_rotary_object(hf, key) for key in ROTARY_KEYS)
    return added or newer


def _scaling(hf: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeScaling | None:
    written = parameters.get("rope_type") or parameters.get("type") or "default"
    if written == "default":
        return None
    kind = SCALINGS[written]
    if kind == "longrope":
        return _longrope(hf, parameters)
    usual = 1.0 if kind == "proportional" else None
    factor = float(number(parameters, "factor", usual, where=ROTARY))
    if kind == "proportional":
        share = float(number(parameters, "partial_rotary_factor", 1.0, where=ROTARY))
        if share > 1:
            config_checks.refuse(ROTARY, "partial_rotary_factor", share, "at most 1")
        return RopeScaling(kind, factor, rotated_share=share)
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "llama3":
        low, high = (
            float(number(parameters, key, where=ROTARY))
            for key in ("low_freq_factor", "high_freq_factor")
        )
        return RopeScaling(kind, factor, low, high, _original_context(hf, parameters))
    if kind == "yarn":
        return _yarn(hf, parameters, factor)
    return RopeScaling(kind, factor, original_context=integer(hf, "max_position_embeddings"))


def _original_context(hf: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """The number of positions before scaling; by default the model's, as in transformers.

    The value in config.json itself has precedence over the one in the rotary object.
    """
    for values in (hf, parameters):
        if values.get(ORIGINAL) is not None:
            return int(number(values, ORIGINAL, where=ROTARY))
    return integer(hf, "max_position_embeddings")


def _longrope(hf: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeScaling:
    """LongRoPE's scaling; the attention factor is computed from the growth of the context."""
    context = config_checks.whole(ROTARY, ORIGINAL, _original_context(hf, parameters), minimum=2)
    growth = integer(hf, "max_position_embeddings") / context
    factor = float(number(parameters, "factor", growth, where=ROTARY))
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return RopeScaling(
        "longrope",
        factor,
        original_context=context,
        attention_factor=float(number(parameters, "attention_factor", usual, ROTARY)),
        short_factors=_factors(parameters, "short_factor"),
        long_factors=_factors(parameters, "long_factor"),
    )


def _factors(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    found = parameters.get(key)
    if not isinstance(found, list):
        config_checks.refuse(ROTARY, key, found, "a list of numbers")
    return tuple(float(config_checks.positive(ROTARY, key, factor)) for factor in found)


def _rotary_dim(
    hf: Mapping[str, Any], head_dim: int, scaling: RopeScaling | None, *, is_allowed: bool
) -> int | None:
    """The number of rotated channels of a head (partial RoPE); None for all of them.

    With `proportional` scaling, the share belongs to the scaling.
    """
    if scaling is not None and scaling.kind == "proportional":
        return None
    key = "partial_rotary_factor"
    given = [places[key] for places in _rotary_places(hf) if places.get(key) is not None]
    if not is_allowed and (found := [share for share in given if share != 1]):
        raise ConfigError(
            f"config.json: {key} is {found[0]}; of this architecture only whole heads are supported"
        )
    if not given or given[0] == 1:
        return None
    return int(head_dim * config_checks.positive(WHERE, key, given[0]))


def _yarn(hf: Mapping[str, Any], parameters: Mapping[str, Any], factor: float) -> RopeScaling:
    """YaRN's scaling. The original context defaults to max_position_embeddings."""
    usual = yarn_attention_factor(factor)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):  # DeepSeek's keys
        one, other = (
            yarn_attention_factor(factor, number(parameters, key, where=ROTARY))
            for key in ("mscale", "mscale_all_dim")
        )
        usual = one / other
    attention, fast, slow = (
        float(number(parameters, key, default, where=ROTARY))
        for key, default in (("attention_factor", usual), ("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    whole = parameters.get("truncate") is None or flag(parameters, "truncate")
    return RopeScaling(
        "yarn",
        factor,
        original_context=_original_context(hf, parameters),
        attention_factor=attention,
        fast_turns=fast,
        slow_turns=slow,
        whole_channels=whole,
    )


def _rotary_object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """hf[key], an object with the rotary scaling; empty if the key is missing.

    Raises ConfigError for any other value, and for a kind of scaling not implemented here.
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
    known = ", ".join(config_checks.ROPE_SCALINGS)
    for kind in kinds:
        if kind not in ("default", *SCALINGS):
            raise ConfigError(
                f"config.json: rotary scaling {kind!r} is not supported: expected default or one "
                f"of {known}"
            )
    if not kinds and written.get("factor") is not None:
        raise ConfigError(
            f"config.json: {key} has a factor and no rope_type: expected default or one of {known}"
        )
    return written


def _positions(hf: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """The number of positions of a model, after its rotary scaling.

    With linear scaling and YaRN, `max_position_embeddings` counts the positions before scaling, as
    Hugging Face's documentation asks for, unless there is `original_max_position_embeddings`; the
    result is `factor` times that. With dynamic scaling it is always the number before. With other
    kinds, and without scaling, `max_position_embeddings` is the result.
    """
    written = integer(hf, "max_position_embeddings")
    if scaling is None or scaling.kind not in ("linear", "yarn", "dynamic"):
        return written
    before = float(written)
    if scaling.kind != "dynamic":
        before = float(_original_context(hf, _rotary_places(hf)[0]))
    if not scaling.factor * before <= MAXIMUM_INTEGER:
        raise ConfigError(
            f"config.json: rotary scaling makes {scaling.factor} times {before:.0f} positions: "
            f"expected at most {MAXIMUM_INTEGER}"
        )
    return max(written, int(scaling.factor * before))
