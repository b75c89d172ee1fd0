"""The `quantization_config` of all formats of compressed-tensors.

It has a `format`, and `config_groups`: each names the modules that it targets, and the formats of
their weights and input activations. Source: compressed-tensors, quantization/quant_config.py,
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
    "naive-quantized",  # either of the two before it
)
NVFP4 = "nvfp4-pack-quantized"
MIXED = "mixed-precision"  # each group has a layout of its own
PACKED_TENSORS = ("weight_packed", "weight_shape")  # of a module of the first alone
GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")  # of an NVFP4 module alone
LINEAR = "Linear"  # the class of modules that a group targets, where it doesn't name them


def is_layout(config: Mapping[str, Any], layout: str) -> bool:
    """Whether a `quantization_config` is of this layout.

    Raises CheckpointError where it is of a layout that no scheme reads.
    """
    if checks.method_of(config) != METHOD:
        return False
    checks.require_choice(config, "format", (PACKED, INTEGERS, FLOATS, NAIVE, NVFP4), SOURCE)
    if config["format"] != NAIVE:
        return config["format"] == layout
    return layout == (INTEGERS if _has_integers(config) else FLOATS)


def split(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]] | None:
    """The targets and the `quantization_config` of each group, if groups have several layouts.

    None where all have one, and for groups of `pack-quantized` alone, which are read together.
    Raises CheckpointError for groups of a mixture that can't be told apart.
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
    """The `config_groups` by name, each an object of one of the layouts. Raises CheckpointError."""
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
    """The one group of a layout of which each group is a part, and a text that names it."""
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
    """A list of modules' names, patterns (`re:…`) and classes. Raises CheckpointError."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{source}: {key} is {value!r:.80}: expected a list of texts")
    for name in value:
        if name.startswith("re:"):
            checks.parse_pattern(name[3:], f"{source}, {key} {name!r:.80}")
    return tuple(value)


def names(targets: Sequence[str], module: str) -> bool:
    """Whether targets name a module, in full or by a pattern."""
    return any(name in targets for name in text_model.written_names(module)) or any(
        text_model.matches(checks.parse_pattern(target[3:], SOURCE), module)
        for target in targets
        if target.startswith("re:")
    )


def by_precedence(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules whose order does not count: full names come before patterns, and LINEAR is last."""
    found: tuple[list[Rule], ...] = ([], [], [])
    for rule in rules:
        for target in rule.targets:
            kind = 2 if target == LINEAR else 1 if target.startswith("re:") else 0
            found[kind].append(rule._replace(targets=(target,)))
    return tuple(rule for kind in found for rule in kind)


def describe_activations(group: Mapping[str, Any], source: str) -> str | None:
    """The format of a group's activations, in words; None for 16 bits. Raises CheckpointError."""
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
    """The activations of a group: in 16 bits, rounded, or not implemented. Raises CheckpointError.

    rounded: those that products round to, with a scale for each token. dynamic, static: in the
    words of `describe_activations`, those with a scale for each token, and with the file's.
    """
    found = describe_activations(group, source)
    if found is not None and found in (dynamic, static):
        return rounded._replace(is_static=found == static)
    return Activations(unsupported=found, operands=rounded.operands)


def has_cache_scales(config: Mapping[str, Any]) -> bool:
    """Whether there is a scheme with static scales, which must be FP8's, of tensors or heads."""
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return False
    source = f"{SOURCE}, kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{source} is {scheme!r}: expected an object")
    checks.require_choice(scheme, "type", ("float",), source)
    checks.require_choice(scheme, "num_bits", (8,), source)
    checks.require_choice(scheme, "symmetric", (True,), source, True)
    if scheme.get("dynamic") is True:  # scales are computed, and none are in the files
        return False
    checks.require_choice(scheme, "dynamic", (False,), source, False)
    checks.require_choice(scheme, "strategy", ("tensor", "attn_head"), source)
    return True


def describe_cache(config: Mapping[str, Any]) -> str | None:
    """The cache that a checkpoint was made for, in words, where its scales are in no file.

    config: a `quantization_config` that has been read.
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
    """The `quantization_config` of groups, each as `write_group` makes it.

    cache: the strategy of an FP8 cache's scales; None where there are none.
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
    """The `weights` of a group; others: keys with values that aren't usual."""
    return _numbers(bits, type, strategy) | others


def write_activations(
    type: str, activations: Activations, group_size: int | None = None
) -> dict[str, Any] | None:
    """The `input_activations` of a group: 8 bits; None for activations in 16 bits.

    group_size: the channels of a token that share a scale, which is computed; None is all.
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
