"""Converts a DecoderConfig to the JSON of mpjax.json and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpjax.models import DecoderConfig, GatedMLPSpec, GroupedQuerySpec, LayerSpec
from mpjax.models.config import RopeScaling, SublayerSpec

JSON_NAMES: dict[type, str] = {str: "string", int: "integer", list: "list", dict: "object"}
HALVES = ("attention", "mlp")
# Fields that other parts of mpjax.json tell: its linear maps have the packed tables.
TOLD_ELSEWHERE = ("packed_tables",)
# Fields that older files of version 5 lack, with the values that they mean.
ADDED: Mapping[str, Mapping[str, Any]] = {
    GroupedQuerySpec.kind: {"sinks": False},
    "rope_scaling": {
        "attention_factor": 1.0,
        "fast_turns": 32.0,
        "slow_turns": 1.0,
        "whole_channels": True,
    },
}
# Fields of GroupedQuerySpec that version 4 of mpjax.json has once for all layers.
OF_ATTENTION_IN_VERSION_4 = ("qkv_bias", "output_bias", "qk_norm")


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The configuration as dictionaries, lists, numbers, booleans and strings."""
    layers = [
        {half: {"kind": spec.kind} | dataclasses.asdict(spec) for half, spec in _halves(layer)}
        for layer in config.layers
    ]
    written = dataclasses.asdict(config) | {"layers": layers}
    return {name: value for name, value in written.items() if name not in TOLD_ELSEWHERE}


def from_json(written: Mapping[str, Any], specs: Iterable[type[SublayerSpec]]) -> DecoderConfig:
    """The configuration that `to_json` wrote; the caller checks its values with `require_sound`.

    specs: classes of attention and MLP specs that layers may have. Raises ValueError, which names
    the key.
    """
    _require_fields("config", written, DecoderConfig, TOLD_ELSEWHERE)
    kinds = {spec.kind: spec for spec in specs}
    layers = get(written, "layers", list)
    values = dict(written) | {
        "layers": tuple(_parse_layer(i, layer, kinds) for i, layer in enumerate(layers)),
        "stop_ids": tuple(get(written, "stop_ids", list)),
    }
    if written["rope_scaling"] is not None:
        scaling = dict(ADDED["rope_scaling"]) | get(written, "rope_scaling", dict)
        _require_fields("rope_scaling", scaling, RopeScaling)
        values["rope_scaling"] = RopeScaling(**scaling)
    return DecoderConfig(**values)


def upgrade(written: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the JSON of a configuration from version 4 of mpjax.json to version 5.

    Version 4 has a list of windows, and every other field of layers once for all layers. Raises
    ValueError, which names the key.
    """
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
    """The value, if it has the JSON type `kind`; else raises ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.80}: expected a JSON {JSON_NAMES[kind]}")
    return value


def _halves(layer: LayerSpec) -> list[tuple[str, SublayerSpec]]:
    return [(half, getattr(layer, half)) for half in HALVES]


def _parse_layer(number: int, written: Any, kinds: Mapping[str, type[SublayerSpec]]) -> LayerSpec:
    where = f"layers[{number}]"
    require(where, written, dict)
    _require_fields(where, written, LayerSpec)
    halves: dict[str, Any] = {}
    for half in HALVES:
        values = dict(get(written, half, dict))
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(
                f"{where}.{half}: kind is {kind!r:.80}: expected one of {', '.join(kinds)}"
            )
        values = dict(ADDED.get(kind, {})) | values
        _require_fields(f"{where}.{half}", values, kinds[kind])
        halves[half] = kinds[kind](**values)
    return LayerSpec(**halves)


def _require_fields(
    where: str, written: Mapping[str, Any], kind: type, left_out: tuple[str, ...] = ()
) -> None:
    names = {field.name for field in dataclasses.fields(kind)} - {*left_out}
    for name in sorted(names ^ written.keys()):
        if name in names:
            raise ValueError(f"{where} has no {name!r}")
        raise ValueError(f"{where} has an unknown key {name!r:.80}")
