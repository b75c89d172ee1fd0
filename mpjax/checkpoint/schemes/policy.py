"""Policy: how each module of a checkpoint is quantised, and what a precision may choose."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from mpjax.checkpoint.schemes import modelopt
from mpjax.checkpoint.schemes.compressed_tensors import LINEAR, names
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.rounded import RoundedReader
from mpjax.checkpoint.schemes.scheme import Rule, Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat

SHOWN_TARGETS = 2  # in messages; ModelOpt lists all modules


@dataclasses.dataclass(frozen=True)
class Part:
    """The modules of a checkpoint with one scheme.

    rules: the first that matches a module counts. targets: as in Rule; in a mixture, the modules of
    this part.
    """

    scheme: Scheme
    rules: tuple[Rule, ...]
    targets: tuple[str, ...] = (LINEAR,)

    @property
    def readers(self) -> tuple[Reader, ...]:
        """The readers of all rules, that of `Linear` first."""
        rules = sorted(self.rules, key=lambda rule: LINEAR not in rule.targets)
        return tuple(rule.reader for rule in rules if rule.reader is not None)

    def reader(self, name: str) -> Reader:
        """The reader of a quantised module.

        Raises CheckpointError if no rule matches it, or config.json leaves it in 16 bits.
        """
        other = "config.json is of another checkpoint"
        for rule in self.rules:
            if LINEAR in rule.targets or names(rule.targets, name):
                if rule.reader is not None:
                    return rule.reader
                raise CheckpointError(
                    f"{name} has packed tensors, but by {rule.key} in config.json it was left in "
                    f"16 bits: {other}"
                )
        quantised = [rule for rule in self.rules if rule.reader is not None]
        named = [rule.key or target for rule in quantised for target in rule.targets]
        named = list(dict.fromkeys(named))
        raise CheckpointError(
            f"{name} is {self.scheme.article} {self.scheme.title} module, but config.json names "
            f"only {shown(named)}: {other}"
        )

    def map(self, change: Callable[[Reader], Reader]) -> Part:
        """The part with changed readers."""
        rules = (rule._replace(reader=rule.reader and change(rule.reader)) for rule in self.rules)
        return dataclasses.replace(self, rules=tuple(rules))

    @property
    def choices(self) -> tuple[Part, ...]:
        """One part for each activation format that a precision may choose."""
        operands = self.readers[0].activations.operands
        choices: list[dict[str, Any]] = [
            {"operand": operand, "unsupported": None} for operand in operands
        ]
        return tuple(
            self.map(functools.partial(_with_activations, **choice)) for choice in choices
        ) or (self,)

    @property
    def contents(self) -> str:
        """A description of the modules in the files, and how they are loaded."""
        usual = self.readers[0]
        static = ", with static scales of activations" if usual.activations.are_static else ""
        return f"{self.scheme.title}, {usual.contents}{static}"


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the modules of a checkpoint are quantised, by its `quantization_config`.

    method: the `quant_method`. parts: one for each scheme and its targets. has_cache_scales:
    whether the checkpoint has scales for an FP8 cache.
    """

    method: str
    parts: tuple[Part, ...]
    has_cache_scales: bool = False

    def part(self, name: str) -> Part:
        """The part of a module. Raises CheckpointError if no part matches it."""
        for part in self.parts:
            if len(self.parts) == 1 or names(part.targets, name):
                return part
        for part in self.parts:
            if LINEAR in part.targets:
                return part
        raise CheckpointError(
            f"{name} is quantised, but config.json names no format for it: config.json is of "
            "another checkpoint"
        )

    def reader(self, name: str) -> Reader:
        """The reader of a module; see Part.reader."""
        return self.part(name).reader(name)

    @property
    def title(self) -> str:
        """The name of the format, with its article, for messages."""
        if len(self.parts) > 1:
            return "a mixed-precision"
        return f"{self.parts[0].scheme.article} {self.parts[0].scheme.title}"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Suffixes of tensor names that are ignored."""
        return tuple(dict.fromkeys(end for part in self.parts for end in part.scheme.ignored))

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The most common weight format on the device of each part."""
        return tuple(dict.fromkeys(part.readers[0].weights for part in self.parts))

    @property
    def contents(self) -> str:
        """A description of the modules in the files, and of their formats when loaded."""
        if len(self.parts) == 1:
            return self.parts[0].contents
        return "; ".join(f"{shown(part.targets)}: {part.contents}" for part in self.parts)

    @property
    def loss(self) -> str | None:
        """A description of what is rounded when loaded; None if nothing is."""
        losses = (part.readers[0].loss for part in self.parts)
        return "; ".join(dict.fromkeys(filter(None, losses))) or None

    @property
    def may_lack_cache_scales(self) -> bool:
        """Whether cache scales are optional: ModelOpt omits scales of 1."""
        return self.method == modelopt.METHOD

    @property
    def unsupported_activations(self) -> str | None:
        """A description of the checkpoint's activation format if it is unsupported; else None.

        Such a checkpoint loads only with a precision that selects one of `choices`.
        """
        readers = (reader for part in self.parts for reader in part.readers)
        return next((found for r in readers if (found := r.activations.unsupported)), None)

    @property
    def choices(self) -> tuple[Policy, ...]:
        """The policies with each combination of activation formats that a precision may choose."""
        combinations = itertools.product(*(part.choices for part in self.parts))
        return tuple(dataclasses.replace(self, parts=parts) for parts in combinations)

    def for_experts(self) -> Policy:
        """The policy for experts, whose activation scales are dynamic, one for each token."""
        return self._map(lambda reader: _with_activations(reader, is_static=False))

    def rounded_to(self, format: WeightFormat) -> Policy | None:
        """The policy that rounds all weights to a format; None if some must keep their codes."""
        readers = [reader for part in self.parts for reader in part.readers]
        if not all(isinstance(reader, RoundedReader) for reader in readers):
            return None
        change: dict[str, Any] = {"target": format}
        return self._map(lambda reader: dataclasses.replace(reader, **change))

    @property
    def target(self) -> WeightFormat | None:
        """The format to which `rounded_to` rounds all weights; None if it wasn't applied."""
        found = {getattr(reader, "target", None) for part in self.parts for reader in part.readers}
        return found.pop() if len(found) == 1 else None

    def _map(self, change: Callable[[Reader], Reader]) -> Policy:
        return dataclasses.replace(self, parts=tuple(part.map(change) for part in self.parts))


def shown(targets: list[str] | tuple[str, ...]) -> str:
    """The first targets of a list, for messages."""
    more = len(targets) - SHOWN_TARGETS
    return ", ".join(targets[:SHOWN_TARGETS]) + (f" and {more} more" if more > 0 else "")


def _with_activations(reader: Reader, **changes: Any) -> Reader:
    """A reader with changed activations, if its scheme has an activation format."""
    if not reader.activations.operands:
        return reader
    changed: dict[str, Any] = {"activations": reader.activations._replace(**changes)}
    return dataclasses.replace(reader, **changed)
