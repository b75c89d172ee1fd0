"""Checks that a checkpoint's weights agree with the requested precision."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.checkpoint.plan import Plan
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.models import ExpertPlace
from mpjax.precision import Precision, describe_table, describe_weights


def format_to_quantize(precision: Precision | None) -> WeightFormat | None:
    """The format to which a precision rounds 16-bit weights; None if it leaves them unchanged."""
    if precision is None or precision.weights is None or not precision.weights.is_packed:
        return None
    return precision.weights


def choose(folder: Path, policy: Policy, precision: Precision | None) -> Policy:
    """Selects the policy of `policy.choices` that has the formats of a precision.

    None and a precision without a W part keep the policy. Raises ValueError if no choice has the
    precision's formats, and CheckpointError if the checkpoint's own activation format is not
    implemented and the precision doesn't choose another.
    """
    if precision is None or not precision.formats:
        kv = KVFormat() if precision is None else precision.kv
        return _with_own_activations(folder, policy, kv)
    rounded = None if precision.weights is None else policy.rounded_to(precision.weights)
    if rounded is not None:
        return rounded
    # Compare formats as asymmetric: symmetry is known only after reading the zero points.
    asked = {dataclasses.replace(format, symmetric=False) for format in precision.formats}
    for choice in policy.choices:
        if {dataclasses.replace(format, symmetric=False) for format in choice.formats} <= asked:
            return choice
    if precision.mixture and len(policy.choices) == 1:
        return policy  # `require_mixture` checks the formats of single modules later
    plain = (dataclasses.replace(format, operand=None) for format in policy.formats)
    found = "+".join(dict.fromkeys(describe_weights(format) for format in plain))
    raise ValueError(
        f"precision is {precision}, but {folder} is {policy.title} checkpoint of "
        f"{found} that can't be quantised again: ask for {names(policy, precision.kv)}, or load a "
        "16-bit checkpoint"
    )


def warn_of_keys(folder: Path, keys: Sequence[str], family: str) -> None:
    """Warns of keys of a config.json that its assumed `family` doesn't have."""
    if keys:
        warnings.warn(
            f"{folder}{os.sep}config.json is taken for that of {family}, which has no "
            f"{', '.join(keys):.300}: the model is wrong if one of them changes what it computes",
            stacklevel=2,
        )


def warn_of_plain(folder: Path, written: Mapping[str, Any] | None) -> None:
    """Warns that the `quantization_config` of a checkpoint without quantised tensors is ignored.

    written: the quantization_config of config.json, or None.
    """
    if written is None:
        return
    method = written.get("quant_method", written.get("method", written.get("quant_algo")))
    warnings.warn(
        f"{folder}: config.json has a quantization_config ({method!r:.80}), and no tensor is "
        "quantised: it is ignored, and the weights are taken as they are; remove it, or take the "
        "quantised checkpoint",
        stacklevel=2,
    )


def warn_of_experts(folder: Path, policy: Policy | None, plan: Plan) -> None:
    """Warns that static activation scales of experts are ignored.

    policy: with the chosen activation formats; 16-bit activations need no scales.
    """
    experts = (
        source.name
        for place, sources in plan.linears
        if isinstance(place, ExpertPlace)
        for source in sources
        if source.reader is not None
    )
    if policy is not None and any(policy.reader(name).activations.are_static for name in experts):
        warnings.warn(
            f"{folder} has static scales for the activations of experts, which are not read: the "
            "activations of experts have a scale for each token",
            stacklevel=4,
        )


def names(policy: Policy, kv: KVFormat) -> str:
    """The precisions in which a quantised checkpoint can be loaded, as a string for messages."""
    return " or ".join(str(Precision.mixed(choice.formats, kv, 16)) for choice in policy.choices)


def require_mixture(folder: Path, plan: Plan, precision: Precision | None) -> None:
    """Raises ValueError if a precision with several weight formats differs from the plan's."""
    if precision is None or not precision.mixture:
        return
    layers = [sources for place, sources in plan.linears if not place.is_table]
    sources = [source for sources in layers for source in sources]
    found = {source.format or WeightFormat("bfloat16") for source in sources}
    if not precision.agrees_with(found):
        texts = sorted(describe_weights(format, precision.bits) for format in found)
        raise ValueError(
            f"precision is {precision}, but the weights in {folder} are {'+'.join(texts)}: ask for "
            f"A{precision.bits}{precision.kv}, which leaves them as they are"
        )


def require_tables(folder: Path, plan: Plan, named: Mapping[str, WeightFormat]) -> None:
    """Raises ValueError if the requested formats of tables differ from the plan's.

    named: requested formats by table path. A checkpoint's quantised head can't be quantised again.
    """
    formats = {place.path: sources[0].format for place, sources in plan.linears if place.is_table}
    require_equal_tables(folder, {path: f for path, f in formats.items() if f}, named)


def require_equal_tables(
    folder: Path, found: Mapping[str, WeightFormat], named: Mapping[str, WeightFormat]
) -> None:
    """Raises ValueError if the requested formats of tables differ from the folder's.

    found, named: the folder's and the requested formats, by table path; tables not in `found` are
    in 16 bits. Symmetry is not compared, since only the zero points decide it.
    """
    for path, asked in named.items():
        there = found.get(path, WeightFormat("bfloat16"))
        if dataclasses.replace(asked, symmetric=False) != dataclasses.replace(
            there, symmetric=False
        ):
            letter = path[0].upper()
            raise ValueError(
                f"the precision has {letter}{describe_table(asked)}, but the {path} in {folder} "
                f"is {letter}{describe_table(there)} and can't be quantised again: leave "
                f"{letter} out"
            )


def _with_own_activations(folder: Path, policy: Policy, kv: KVFormat) -> Policy:
    if policy.unsupported_activations is None:
        return policy
    raise CheckpointError(
        f"{folder / 'config.json'}: the checkpoint was made for activations in "
        f"{policy.unsupported_activations}, which are not implemented: ask for the precision "
        f"{names(policy, kv)}, which leave the weights as they are"
    )
