"""Converts a DecoderConfig to the JSON of mpjax.json and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpjax.models import (
    DecoderConfig,
    ExpertsSpec,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    MLPSpec,
)
from mpjax.models.config import RopeScaling, SublayerSpec

JSON_NAMES: dict[type, str] = {str: "string", int: "integer", list: "list", dict: "object"}
HALVES = ("attention", "mlp")
# Fields that follow from other parts of mpjax.json: packed tables are among its linear maps.
TOLD_ELSEWHERE = ("packed_tables",)
# Fields that are omitted if they have their default, as in files older than the field.
RARE: Mapping[type, tuple[str, ...]] = {
    DecoderConfig: (
        *("local_rope_scaling", "centered_norms", "norm_bias", "predicts", "labels"),
        *("head_bias", "per_layer_vocab", "embedding_norm", "post_norm_eps"),
    ),
    RopeScaling: ("rotated_share",),
    LayerSpec: ("scaled", "per_layer", "streams"),
    GroupedQuerySpec: (
        *("heads", "kv_heads", "head_dim", "keys_as_values", "value_norm"),
        "reads_back",
        "interleaved",
        "norm_after",
        "growth",
        "growth_context",
        "bidirectional",
        "factors",
        "output_gate",
        *("gate_map", "norm_weights", "chunked", "growth_from_one"),
    ),
    GatedMLPSpec: ("factors", "sparsity"),
    ExpertsSpec: (
        *("ungated", "jitter", "transposed_files", "weighs_inputs"),
        *("activation", "own_norms", "shared_factor"),
    ),
    MLPSpec: ("hadamard",),
}
SCALINGS = ("rope_scaling", "local_rope_scaling")
# Fields of GroupedQuerySpec that version 4 of mpjax.json stores once for all layers.
OF_ATTENTION_IN_VERSION_4 = ("qkv_bias", "output_bias", "qk_norm")
# Fields that version 5 lacks; its models all have the defaults.
ADDED_IN_VERSION_6: Mapping[type, tuple[str, ...]] = {
    DecoderConfig: (
        *("rotary_dim", "local_rope_theta", "offset_norms"),
        *("embedding_scale", "logit_scale", "logit_softcap"),
    ),
    RopeScaling: (
        *("attention_factor", "fast_turns", "slow_turns", "whole_channels"),
        *("short_factors", "long_factors"),
    ),
    LayerSpec: ("norms",),
    GroupedQuerySpec: ("rope", "joint_norm", "scale", "softcap", "sinks"),
    GatedMLPSpec: ("activation",),
}


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The configuration as JSON values: dictionaries, lists, numbers, booleans and strings."""
    layers = [_fields(layer) for layer in config.layers]
    scalings = {name: getattr(config, name) for name in SCALINGS if getattr(config, name)}
    written = _fields(config) | {"layers": layers}
    written |= {name: _fields(scaling) for name, scaling in scalings.items()}
    return {name: value for name, value in written.items() if name not in TOLD_ELSEWHERE}


def from_json(written: Mapping[str, Any], specs: Iterable[type[SublayerSpec]]) -> DecoderConfig:
    """The configuration that `to_json` wrote; the caller checks its values with `require_sound`.

    specs: the spec classes of sublayers that layers may have. Raises ValueError, which names the
    key.
    """
    _require_fields("config", written, DecoderConfig, TOLD_ELSEWHERE)
    kinds = {spec.kind: spec for spec in specs}
    layers = get(written, "layers", list)
    values = dict(written) | {
        "layers": tuple(_parse_layer(i, layer, kinds) for i, layer in enumerate(layers)),
        "stop_ids": tuple(get(written, "stop_ids", list)),
    }
    for name in SCALINGS:
        if written.get(name) is not None:
            scaling = get(written, name, dict)
            _require_fields(name, scaling, RopeScaling)
            values[name] = RopeScaling(**scaling)
    return DecoderConfig(**values)


def upgrade(written: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Converts the JSON of a configuration from version 4 or 5 of mpjax.json to version 6.

    Version 4 has a list of windows, and other layer fields once for all layers. Both versions lack
    the fields of ADDED_IN_VERSION_6. Raises ValueError, which names the key.
    """
    values = _with_layers(written) if version == 4 else dict(written)
    values = _with_added(values, DecoderConfig)
    if isinstance(scaling := values.get("rope_scaling"), dict):
        values["rope_scaling"] = _with_added(scaling, RopeScaling)
    layers = values.get("layers")
    if isinstance(layers, list):  # otherwise `from_json` refuses it
        values["layers"] = [_upgrade_layer(x) if isinstance(x, dict) else x for x in layers]
    return values


def _upgrade_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    values = _with_added(layer, LayerSpec)
    kinds: tuple[type[SublayerSpec], ...] = (GroupedQuerySpec, GatedMLPSpec)
    for half, kind in zip(HALVES, kinds, strict=True):
        spec = values.get(half)
        if isinstance(spec, dict) and spec.get("kind") == kind.kind:
            values[half] = _with_added(spec, kind)
    return values


def _with_added(written: Mapping[str, Any], kind: type) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: defaults[name] for name in ADDED_IN_VERSION_6[kind]} | dict(written)


def _with_layers(written: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(written)

    def take(key: str) -> Any:
        if key not in values:
            raise ValueError(f"config has no {key!r}")
        return values.pop(key)

    attention = {name: take(name) for name in OF_ATTENTION_IN_VERSION_4}
    mlp = {"intermediate_size": take("intermediate_size"), "bias": take("mlp_bias")}
    values["layers"] = [
        {
            "attention": {"kind": GroupedQuerySpec.kind, "window": window} | attention,
            "mlp": {"kind": GatedMLPSpec.kind} | mlp,
        }
        for window in require("windows", take("windows"), list)
    ]
    return values


def get(written: Mapping[str, Any], key: str, kind: type) -> Any:
    """written[key]. Raises ValueError for a missing key, and for a value of another JSON type."""
    if key not in written:
        raise ValueError(f"the key {key!r} is missing")
    return require(key, written[key], kind)


def require(name: str, value: Any, kind: type) -> Any:
    """Returns the value; raises ValueError unless it has the JSON type `kind`."""
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.80}: expected a JSON {JSON_NAMES[kind]}")
    return value


def _spec(spec: SublayerSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"kind": spec.kind} | _fields(spec)


def _fields(spec: DecoderConfig | SublayerSpec | LayerSpec | RopeScaling) -> dict[str, Any]:
    values = dataclasses.asdict(spec)
    for field in dataclasses.fields(spec):
        if isinstance(part := getattr(spec, field.name), SublayerSpec):
            values[field.name] = _spec(part)
    for field in dataclasses.fields(spec):
        if _is_rare(type(spec), field.name) and values[field.name] == field.default:
            del values[field.name]
    return values


def _is_rare(kind: type, name: str) -> bool:
    """Whether a field of a spec class is omitted if it has its default."""
    return any(issubclass(kind, base) and name in names for base, names in RARE.items())


def _parse_layer(number: int, written: Any, kinds: Mapping[str, type[SublayerSpec]]) -> LayerSpec:
    where = f"layers[{number}]"
    require(where, written, dict)
    _require_fields(where, written, LayerSpec)
    halves: dict[str, Any] = {
        half: _parse_spec(f"{where}.{half}", get(written, half, dict), kinds)
        for half in (*HALVES, "per_layer", "streams")
        if written.get(half) is not None
    }
    norms = {"norms": get(written, "norms", str)}
    return LayerSpec(**dict(written) | dict.fromkeys(HALVES) | halves | norms)


def _parse_spec(
    where: str, written: Mapping[str, Any], kinds: Mapping[str, type[SublayerSpec]]
) -> SublayerSpec:
    values = dict(written)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{where}: kind is {kind!r:.80}: expected one of {', '.join(kinds)}")
    _require_fields(where, values, kinds[kind])
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = _parse_spec(f"{where}.{name}", value, kinds)
    return kinds[kind](**values)


def _require_fields(
    where: str, written: Mapping[str, Any], kind: type, left_out: tuple[str, ...] = ()
) -> None:
    names = {field.name for field in dataclasses.fields(kind)} - {*left_out}
    for name in sorted(names ^ written.keys()):
        if _is_rare(kind, name):
            continue
        if name in names:
            raise ValueError(f"{where} has no {name!r}")
        raise ValueError(f"{where} has an unknown key {name!r:.80}")
