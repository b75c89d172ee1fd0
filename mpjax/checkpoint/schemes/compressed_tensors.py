"""Reads and writes the `quantization_config` of all compressed-tensors formats.

It has a `format`, and `config_groups`, each with target modules and the formats of their weights
and input activations. Source: compressed-tensors, quantization/quant_config.py,
quantization/quant_args.py and utils/match.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax.checkpoint import text_model
from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Activations
from mpjax.checkpoint.schemes.scheme import Rule
from mpjax.errors import CheckpointError

METHOD = "compressed-tensors"
SOURCE = "quantization_config of a compressed-tensors checkpoint"
PACKED, INTEGERS, FLOATS, NAIVE = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",  # stands for one of the two above
)
NVFP4 = "nvfp4-pack-quantized"
MIXED = "mixed-precision"  # each group has its own layout
PACKED_TENSORS = ("weight_packed", "weight_shape")  # only of a PACKED module
GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")  # only of an NVFP4 module
LINEAR = "Linear"  # a target that stands for all linear modules


def is_layout(config: Mapping[str, Any], layout: str) -> bool:
    """Whether a `quantization_config` is of this layout.

    Raises CheckpointError for a layout that no scheme supports.
    """
    if checks.method_of(config) != METHOD:
        return False
    checks.require_choice(config, "format", (PACKED, INTEGERS, FLOATS, NAIVE, NVFP4), SOURCE)
    if config["format"] != NAIVE:
        return config["format"] == layout
    return layout == (INTEGERS if _has_integers(config) else FLOATS)


def split(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]] | None:
    """(targets, `quantization_config`) of each group, if the groups have several layouts.

    None for one layout, also for several groups of `pack-quantized`, which are read together.
    Raises CheckpointError for a mixture whose groups lack a format.
    """
    groups, usual = config.get("config_groups"), config.get("format")
    is_sound = isinstance(groups, Mapping) and all(isinstance(g, Mapping) for g in groups.values())
    if not is_sound or not groups:
        if usual != MIXED:
            return None
        raise CheckpointError(
            f"{SOURCE}: config_groups is {groups!r:.80}: expected a map of groups"
        )
    are_packed = all((group.get("format") or usual) == PACKED for group in groups.values())
    if usual != MIXED and (are_packed or len(groups) < 2):
        return None
    parts = []
    for name, group in groups.items():
        where = f"{SOURCE}, group {name!r}"
        layout = group.get("format") or usual
        if layout == MIXED:
            raise CheckpointError(f"{where} has no format of its own, as {MIXED} asks for")
        targets = read_names(group.get("targets"), "targets", where)
        alone = {**config, "format": layout, "config_groups": {name: group}}
        parts.append((targets, alone))
    return parts


def _has_integers(config: Mapping[str, Any]) -> bool:
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type") == "int":
            return True
    return False


def read_groups(
    config: Mapping[str, Any], layouts: tuple[str, ...], source: str
) -> dict[str, Mapping[str, Any]]:
    """The `config_groups` by name, checked to have one of `layouts`. Raises CheckpointError."""
    checks.require_choice(config, "format", layouts, source)
    if config.get("transform_config"):
        raise CheckpointError(
            f"{source}: there is a transform_config: checkpoints with one can't be read"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{source}: config_groups is {groups!r}: expected a map of groups")
    for name, group in groups.items():
        where = f"{source}, group {name!r}"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{where} is {group!r}: expected an object")
        checks.require_choice(group, "format", layouts, where, layouts[0])
        checks.require_choice(group, "output_activations", (None,), where)
    return dict(groups)


def read_only_group(
    config: Mapping[str, Any], layouts: tuple[str, ...], source: str
) -> tuple[Mapping[str, Any], str]:
    """The only group of a config, and its description for messages."""
    [(name, group)] = read_groups(config, layouts, source).items()
    return group, f"{source}, group {name!r}"


def read_integers(group: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The `weights` of a group, which must be static integers. Raises CheckpointError."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{source}, weights is {weights!r}: expected an object")
    source = f"{source}, weights"
    checks.require_choice(weights, "type", ("int",), source)
    checks.require_choice(weights, "dynamic", (False,), source, False)
    return weights


def read_names(value: Any, key: str, source: str) -> tuple[str, ...]:
    """A list of module names, patterns (`re:…`) and classes. Raises CheckpointError."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{source}: {key} is {value!r:.80}: expected a list of texts")
    for name in value:
        if name.startswith("re:"):
            checks.parse_pattern(name[3:], f"{source}, {key} {name!r:.80}")
    return tuple(value)


def names(targets: Sequence[str], module: str) -> bool:
    """Whether targets include a module, by its full name or by a pattern."""
    return any(name in targets for name in text_model.written_names(module)) or any(
        text_model.matches(checks.parse_pattern(target[3:], SOURCE), module)
        for target in targets
        if target.startswith("re:")
    )


def by_precedence(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Orders rules by precedence: full names, then patterns, then LINEAR."""
    found: tuple[list[Rule], ...] = ([], [], [])
    for rule in rules:
        for target in rule.targets:
            kind = 2 if target == LINEAR else 1 if target.startswith("re:") else 0
            found[kind].append(rule._replace(targets=(target,)))
    return tuple(rule for kind in found for rule in kind)


def describe_activations(group: Mapping[str, Any], source: str) -> str | None:
    """A group's activation format in words; None for 16 bits. Raises CheckpointError."""
    written = group.get("input_activations")
    if not written:
        return None
    if not isinstance(written, Mapping):
        raise CheckpointError(f"{source}, input_activations is {written!r}: expected an object")
    kind = f"{written.get('num_bits')}-bit {written.get('type')}"
    strategy, size = written.get("strategy"), written.get("group_size")
    of = f"groups of {size}" if strategy == "group" and size else f"strategy {strategy!r}"
    skewed = "" if written.get("symmetric", True) else "zero points and "
    change = "dynamic" if written.get("dynamic") is True else "static"
    return f"{kind} with {skewed}{change} scales ({of})"


def read_activations(
    group: Mapping[str, Any],
    source: str,
    rounded: Activations,
    *,
    dynamic: str,
    static: str | None,
) -> Activations:
    """The Activations of a group: 16 bits, rounded, or unsupported. Raises CheckpointError.

    rounded: the result for activations with a scale for each token. dynamic, static: the supported
    formats with a scale for each token, and with the file's scale, in the words of
    `describe_activations`.
    """
    found = describe_activations(group, source)
    if found is not None and found in (dynamic, static):
        return rounded._replace(is_static=found == static)
    return Activations(unsupported=found, operands=rounded.operands)


def has_cache_scales(config: Mapping[str, Any]) -> bool:
    """Whether the cache has static scales, which must be FP8's, per tensor or per head."""
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return False
    source = f"{SOURCE}, kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{source} is {scheme!r}: expected an object")
    checks.require_choice(scheme, "type", ("float",), source)
    checks.require_choice(scheme, "num_bits", (8,), source)
    checks.require_choice(scheme, "symmetric", (True,), source, True)
    if scheme.get("dynamic") is True:  # dynamic scales are not in the files
        return False
    checks.require_choice(scheme, "dynamic", (False,), source, False)
    checks.require_choice(scheme, "strategy", ("tensor", "attn_head"), source)
    return True


def describe_cache(config: Mapping[str, Any]) -> str | None:
    """The cache format of a checkpoint with dynamic cache scales, in words; else None.

    config: a checked `quantization_config`.
    """
    scheme = config.get("kv_cache_scheme")
    if checks.method_of(config) != METHOD or not isinstance(scheme, Mapping):
        return None
    if scheme.get("dynamic") is not True:
        return None
    return f"{scheme.get('num_bits')}-bit {scheme.get('type')} with dynamic scales"


def write(
    layout: str, groups: Sequence[Mapping[str, Any]], ignored: Sequence[str], cache: str | None
) -> dict[str, Any]:
    """The `quantization_config` of groups made by `write_group`.

    cache: the strategy of an FP8 cache's scales; None without scales.
    """
    return {
        "quant_method": METHOD,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": {**group} for index, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None if cache is None else _numbers(8, "float", cache),
    }


def write_group(
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
    targets: Sequence[str] = (LINEAR,),
) -> dict[str, Any]:
    """One of the `config_groups`."""
    return {
        "targets": list(targets),
        "weights": {**weights},
        "input_activations": None if activations is None else {**activations},
        "output_activations": None,
    }


def write_weights(bits: int, type: str, strategy: str, **others: Any) -> dict[str, Any]:
    """The `weights` of a group. others: keys that differ from the usual values."""
    return _numbers(bits, type, strategy) | others


def write_activations(
    type: str, activations: Activations, group_size: int | None = None
) -> dict[str, Any] | None:
    """The `input_activations` of a group: 8 bits; None for activations in 16 bits.

    group_size: the channels of a token that share a dynamic scale; None for all.
    """
    if activations.operand is None:
        return None
    if activations.is_static:
        return _numbers(8, type, "tensor")
    strategy = "token" if group_size is None else "group"
    return _numbers(8, type, strategy) | {"dynamic": True, "group_size": group_size}


def _numbers(bits: int, type: str, strategy: str) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": type,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
