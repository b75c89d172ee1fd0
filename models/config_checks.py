"""Checks of a configuration's values: types, ranges, and consistency between values.

Every message has one form: `where: name is value: expected ...`. Readers of config.json check
single values with the same functions before they compute with them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.models.config import (
    SCALINGS_BY_LENGTH,
    AttentionSpec,
    ConfigError,
    DecoderConfig,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    RopeScaling,
    SublayerSpec,
)

DTYPES = ("bfloat16", "float16", "float32")
ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
ROPES = ("global", "local", "none", "draft")
NORMS = ("pre", "post", "both", "shared")
MAXIMUM_INTEGER = 2**31 - 1  # positions, lengths and token ids are int32
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def refuse(where: str, name: str, value: Any, expected: str) -> typing.NoReturn:
    """Raises ConfigError: `where: name is value: expected ...`, on one line."""
    shown = " ".join(repr(value).split())
    raise ConfigError(f"{where}: {name} is {shown:.80}: expected {expected}")


def whole(
    where: str, name: str, value: Any, minimum: int = 1, maximum: int = MAXIMUM_INTEGER
) -> int:
    """The value, if it is an integer from minimum to maximum; else raises ConfigError."""
    if type(value) is int and value > maximum:
        refuse(where, name, value, f"at most {maximum}")
    if type(value) is not int or value < minimum:
        expected = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
        refuse(where, name, value, expected)
    return value


def positive(where: str, name: str, value: Any) -> float:
    """The value, if it is a positive number in float32's range; else raises ConfigError.

    Models compute in float32, where a smaller number underflows to 0 and a larger one to infinity.
    """
    if type(value) not in (int, float) or not value > 0:
        refuse(where, name, value, "a positive number")
    if not LEAST <= value <= MOST:
        refuse(where, name, value, f"a positive number from {LEAST:.2g} to {MOST:.2g}, as float32")
    return value


def switch(where: str, name: str, value: Any) -> bool:
    """The value, if it is a boolean; else raises ConfigError."""
    if type(value) is not bool:
        refuse(where, name, value, "true or false")
    return value


def choice(where: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """The value, if it is one of `choices`; else raises ConfigError."""
    if value not in choices:
        refuse(where, name, value, " or ".join(choices))
    return value


def token_ids(where: str, name: str, value: Any, vocabulary: int) -> tuple[int, ...]:
    """Token ids as a tuple, from a list or a single id.

    vocabulary: the number of token ids. Raises ConfigError for a value that is not an integer
    from 0 to vocabulary − 1.
    """
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        refuse(where, name, value, f"token ids from 0 to {vocabulary - 1}")
    return tuple(ids)


def require_sound(
    config: DecoderConfig,
    where: str = "DecoderConfig",
    names: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Raises ConfigError for a value with which no decoder can be built.

    where: the source of the configuration, for messages, such as `config.json`.
    names: the source's names of fields, where they differ from DecoderConfig's.
    """

    def name(field: str) -> str:
        return names.get(field, field)

    _check_fields(config, where, names)
    if not config.layers:
        raise ConfigError(f"{where}: layers is empty: expected one or more")
    for index, layer in {id(layer): (i, layer) for i, layer in enumerate(config.layers)}.values():
        _check_layer(layer, where, f"layers[{index}]")
    token_ids(where, name("stop_ids"), config.stop_ids, config.vocab_size)
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{where}: {name('num_heads')} is {config.num_heads} and {name('num_kv_heads')} "
            f"{config.num_kv_heads}: expected a multiple of it"
        )
    if config.head_dim % 2:
        refuse(where, name("head_dim"), config.head_dim, "a positive, even number")
    if (rotated := config.rotary_dim) is not None and (rotated % 2 or rotated > config.head_dim):
        refuse(where, name("rotary_dim"), rotated, f"an even number up to {config.head_dim}")
    _check_heads(config, where, names)
    choice(where, "dtype", config.dtype, DTYPES)
    if not all(table in config.tables for table in config.packed_tables):
        expected = f"some of {', '.join(config.tables)}"
        refuse(where, name("packed_tables"), config.packed_tables, expected)
    for kind in ("", "local_"):
        _check_scaling(config, kind, where, names)
    _check_lengths(config, where, names)


def _check_heads(config: DecoderConfig, where: str, names: Mapping[str, str]) -> None:
    """Checks that layers with one kind of rotary embedding, and so one set of angles, fit it.

    So must layers that read another one's keys and values, and those with per-layer embeddings or
    several residual streams.
    """
    name = names.get("head_dim", "head_dim")
    for half in ("per_layer", "streams"):
        if len({getattr(layer, half) for layer in config.layers}) > 1:
            refuse(where, f"{half} of the layers", "of several kinds", "one spec in all layers")
    for index, source in enumerate(config.sources):
        if source is None:
            continue
        specs: list[Any] = [config.layers[i].attention for i in (index, max(source, 0))]
        alike = [(each.window, each.sizes(config)) for each in specs if hasattr(each, "sizes")]
        if source < 0 or config.sources[source] is not None or len({*alike}) != 1 or len(alike) < 2:
            expected = "the distance of a layer with keys and values, and equal window and heads"
            refuse(where, f"layers[{index}]: reads_back", index - source, expected)
    for index, spec in enumerate(layer.attention for layer in config.layers):
        for rope in spec.ropes if spec else ():
            assert spec is not None
            dim, usual = spec.rotary_channels(config), config.head_dim_of(rope)
            if dim != usual:
                expected = f"{usual}, as in the other layers whose rope is {rope!r}"
                refuse(where, f"layers[{index}]: {name}", dim, expected)
            if dim != config.head_dim and config.rotary_dim is not None:
                refuse(where, f"layers[{index}]: {name}", dim, "no rotary_dim beside it")


def _check_scaling(config: DecoderConfig, kind: str, where: str, names: Mapping[str, str]) -> None:
    """Checks a rotary scaling. kind: the prefix of its fields in the configuration."""

    def name(field: str) -> str:
        return names.get(field, field)

    scaling, theta = getattr(config, f"{kind}rope_scaling"), getattr(config, f"{kind}rope_theta")
    if scaling is None:
        return
    if not isinstance(scaling, RopeScaling):
        refuse(where, name(f"{kind}rope_scaling"), scaling, "a RopeScaling, or None")
    if scaling.kind == "yarn" and theta == 1:  # all pairs would have one frequency
        refuse(where, name(f"{kind}rope_theta"), theta, "another number than 1 with YaRN")
    rotated = config.rotary_dim or config.head_dim_of("local" if kind else "global")
    if scaling.kind == "dynamic" and rotated == 2:  # a single pair doesn't depend on theta
        field = "rotary_dim" if config.rotary_dim else "head_dim"
        refuse(where, name(field), rotated, "4 or more with dynamic scaling")
    where = f"{where}, {name(f'{kind}rope_scaling')}"
    _check_fields(scaling, where, names)
    choice(where, "kind", scaling.kind, ROPE_SCALINGS)
    pairs = rotated // 2
    for field in ("short_factors", "long_factors"):
        factors = getattr(scaling, field)
        if scaling.kind == "longrope" and len(factors) != pairs:
            refuse(where, name(field), factors, f"a list of {pairs} numbers, one for each pair")
        for factor in factors:
            positive(where, name(field), factor)
    if not scaling.high_frequency_factor >= scaling.low_frequency_factor:
        least = f"at least {name('low_frequency_factor')}, {scaling.low_frequency_factor}"
        refuse(where, name("high_frequency_factor"), scaling.high_frequency_factor, least)


def _check_lengths(config: DecoderConfig, where: str, names: Mapping[str, str]) -> None:
    """Checks that both scalings change at one length: sequences are prefilled again only once."""
    both = config.rope_scaling, config.local_rope_scaling
    found = [(s.kind, s.original_context) for s in both if s and s.kind in SCALINGS_BY_LENGTH]
    if len({*found}) > 1:
        [(kind, context), (_, local)] = found
        where = f"{where}, {names.get('local_rope_scaling', 'local_rope_scaling')}"
        field = names.get("original_context", "original_context")
        refuse(where, field, local, f"{kind} with {context}, as in the other layers")


def _check_layer(layer: LayerSpec, where: str, name: str) -> None:
    if not isinstance(layer, LayerSpec):
        refuse(where, name, layer, "a LayerSpec")
    choice(where, f"{name}.norms", layer.norms, NORMS)
    switch(where, f"{name}.scaled", layer.scaled)
    kinds: tuple[tuple[str, Any, str], ...] = (
        *(("attention", MixerSpec, "a MixerSpec"), ("mlp", MLPSpec, "an MLPSpec")),
        ("per_layer", SublayerSpec, "a PerLayerSpec"),
        ("streams", SublayerSpec, "a StreamsSpec"),
    )
    is_usual = layer.norms == "both" and layer.attention and layer.mlp and not layer.scaled
    if layer.streams and not is_usual:
        expected = "both norms, an attention, an mlp and no scale beside several streams"
        refuse(where, f"{name}.streams", layer.streams, expected)
    if len(layer.halves) < (2 if layer.norms == "shared" else 1):
        refuse(where, name, layer, "an attention, an mlp, or both, which share a norm if they must")
    for half, kind, expected in kinds:
        if (spec := getattr(layer, half)) is None:
            continue
        if not isinstance(spec, kind):
            refuse(where, f"{name}.{half}", spec, f"{expected}, or None")
        _check_spec(spec, f"{where}, {name}.{half}")


def _check_spec(spec: SublayerSpec, where: str) -> None:
    _check_fields(spec, where, {})
    for field in dataclasses.fields(spec):
        if isinstance(part := getattr(spec, field.name), SublayerSpec):
            _check_spec(part, f"{where}.{field.name}")
    if isinstance(spec, AttentionSpec):
        choice(where, "rope", spec.rope, ROPES)
    if reason := spec.why_unsound():
        raise ConfigError(f"{where}: {reason}")


def _check_fields(
    config: DecoderConfig | SublayerSpec | RopeScaling, where: str, names: Mapping[str, str]
) -> None:
    """Checks the numbers, which must be positive, booleans and strings of a dataclass."""
    kind: Any = type(config)  # Any: mypy believes the type to be unhashable
    for field, kinds in _field_types(kind).items():
        value, name = getattr(config, field), names.get(field, field)
        if value is not None or type(None) not in kinds:
            _check_value(kinds, where, name, value)


def _check_value(kinds: tuple[Any, ...], where: str, name: str, value: Any) -> None:
    """Checks a value against the types that its field may have."""
    if tuple[float, ...] in kinds:
        if not isinstance(value, tuple):
            refuse(where, name, value, "a list of numbers")
        for number in value:
            positive(where, name, number)
    elif bool in kinds:
        switch(where, name, value)
    elif float in kinds:
        positive(where, name, value)
    elif int in kinds:
        whole(where, name, value)
    elif str in kinds and type(value) is not str:
        refuse(where, name, value, "a text")
    elif MixerSpec in kinds and not isinstance(value, MixerSpec):
        refuse(where, name, value, "a MixerSpec")


@functools.cache
def _field_types(config: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a dataclass may have, by the field's name."""
    hints = typing.get_type_hints(config)
    unions = (typing.Union, types.UnionType)
    return {
        field.name: typing.get_args(hint) if typing.get_origin(hint) in unions else (hint,)
        for field in dataclasses.fields(config)
        for hint in [hints[field.name]]
    }
