"""Whether a checkpoint is, or can be made, what a precision asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mpjax.checkpoint.plan import Plan
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.precision import Precision, describe_weights


def format_to_quantize(precision: Precision | None) -> WeightFormat | None:
    """The format that a precision rounds 16-bit weights to; None where it leaves them."""
    if precision is None or precision.weights is None or not precision.weights.is_packed:
        return None
    return precision.weights


def choose(folder: Path, scheme: Scheme, precision: Precision | None) -> Scheme:
    """The scheme with the activations that a precision asks for, or with its own.

    Raises ValueError for a precision that a quantised checkpoint can't have, and CheckpointError
    for a checkpoint that only some precision can be asked for.
    """
    if precision is None or not precision.formats:
        return _as_it_is(folder, scheme, KVFormat() if precision is None else precision.kv)
    # Whether zero points are all the middle is seen as they are read, whatever it is called.
    asked = {dataclasses.replace(format, symmetric=False) for format in precision.formats}
    for choice in scheme.choices:
        if choice.weights in asked:
            return choice
    if precision.mixture and len(scheme.choices) == 1:
        return scheme  # single modules may have other formats: `require_mixture` sees them
    found = describe_weights(dataclasses.replace(scheme.weights, operand=None))
    raise ValueError(
        f"precision is {precision}, but {folder} is {scheme.article} {scheme.title} checkpoint of "
        f"{found} that can't be quantised again: ask for {names(scheme, precision.kv)}, or load a "
        "16-bit checkpoint"
    )


def names(scheme: Scheme, kv: KVFormat) -> str:
    """The precisions that a quantised checkpoint can be loaded in, for messages."""
    return " or ".join(str(Precision(choice.weights, kv)) for choice in scheme.choices)


def require_mixture(folder: Path, plan: Plan, precision: Precision | None) -> None:
    """Raises ValueError where weights are to be a mixture that the checkpoint is not."""
    if precision is None or not precision.mixture:
        return
    sources = [source for _, sources in plan.linears for source in sources]
    found = {source.format or WeightFormat("bfloat16") for source in sources}
    if not precision.agrees_with(found):
        texts = sorted(describe_weights(format, precision.bits) for format in found)
        raise ValueError(
            f"precision is {precision}, but the weights in {folder} are {'+'.join(texts)}: ask for "
            f"A{precision.bits}{precision.kv}, which leaves them as they are"
        )


def _as_it_is(folder: Path, scheme: Scheme, kv: KVFormat) -> Scheme:
    if scheme.unsupported_activations is None:
        return scheme
    raise CheckpointError(
        f"{folder / 'config.json'}: it was made for activations in "
        f"{scheme.unsupported_activations}, which are not implemented: ask for the precision "
        f"{names(scheme, kv)}, which leave the weights as they are"
    )
