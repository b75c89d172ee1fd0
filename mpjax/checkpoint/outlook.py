"""Predicts from the headers alone what loading a checkpoint does.

That is: which quantised weights keep their codes or are rounded, and how many bytes the weights
take in other precisions. Nothing is read or allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from mpjax.checkpoint import agreement, huggingface
from mpjax.checkpoint.huggingface import Opened
from mpjax.checkpoint.plan import make_plan
from mpjax.checkpoint.schemes import compressed_tensors
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.precision import Precision

# Precisions to which weights can be rounded, and the group sizes to try, the default first.
ROUNDED, GROUPS = ("W8{}A16KV8", "W4{}A16KV8"), ("", "g64", "g32", "gK")


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The result of `load` for a Hugging Face checkpoint or a GGUF file, in words.

    contents: the weights in the files, and whether they keep their codes.
    activations: the required choice of an activation format; None if there is none.
    cache: the checkpoint's cache format if it is not supported, or None.
    rounded: what is lost by rounding, or None.
    others: bytes of all weights on a device in other possible precisions, by precision.
    """

    contents: str
    activations: str | None
    cache: str | None
    rounded: str | None
    others: dict[str, int]


def look(opened: Opened) -> Outlook:
    """The Outlook of an opened, loadable checkpoint."""
    policy, others = opened.policy, dict(_others(opened))
    if policy is None:
        return Outlook(f"numbers in {opened.config.dtype}", None, None, None, others)
    choice, unsupported = None, policy.unsupported_activations
    if unsupported is not None:
        names = agreement.names(policy, KVFormat())
        choice = f"made for {unsupported}, not implemented: load it as {names}"
    return Outlook(policy.contents, choice, _cache(opened), policy.loss, others)


def _cache(opened: Opened) -> str | None:
    written = huggingface.read_config(opened.path).get("quantization_config")
    found = None if written is None else compressed_tensors.describe_cache(written)
    if found is None:
        return None
    return f"made for {found}: KV8 has integers with a scale for each token and head"


def _others(opened: Opened) -> Iterator[tuple[str, int]]:
    """Yields precisions and bytes: the policy's choices, and precisions to round weights to."""
    choices = () if opened.policy is None else opened.policy.choices
    if len(choices) > 1:
        for choice in choices:
            yield str(Precision.mixed(choice.formats, KVFormat(), 16)), _bytes(opened, choice)
    for pattern in ROUNDED if _can_be_rounded(opened) else ():
        tried = (_rounded(opened, Precision.parse(pattern.format(size))) for size in GROUPS)
        if (found := next(filter(None, tried), None)) is not None:
            yield found


def _can_be_rounded(opened: Opened) -> bool:
    policy = opened.policy
    return policy is None or policy.rounded_to(WeightFormat("uint8")) is not None


def _rounded(opened: Opened, precision: Precision) -> tuple[str, int] | None:
    """A precision and its bytes; None if its groups don't divide the input channels."""
    target = precision.weights
    assert target is not None
    policy = None if opened.policy is None else opened.policy.rounded_to(target)
    if opened.config.dtype == "float32":  # A16 turns it into bfloat16
        config = dataclasses.replace(opened.config, dtype="bfloat16")
        opened = dataclasses.replace(opened, config=config)
    with contextlib.suppress(CheckpointError):
        return str(precision), _bytes(opened, policy, target)
    return None


def _bytes(opened: Opened, policy: Policy | None, target: WeightFormat | None = None) -> int:
    plan = make_plan(opened.checkpoint, opened.decoder, opened.config, policy, target)
    return plan.device_bytes
