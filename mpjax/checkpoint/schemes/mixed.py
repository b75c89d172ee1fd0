"""Checkpoints whose modules are quantised in several formats: each module has the scheme of one.

compressed-tensors has a group of `config_groups` for each format, which names its modules, and
`format` is `mixed-precision`, or a group has a `format` of its own. ModelOpt lists the algorithm of
each module in `quantized_layers`. Source: compressed-tensors, quantization/quant_config.py;
TensorRT Model Optimizer, torch/export/convert_hf_config.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from mpjax.checkpoint.schemes import checks, compressed_tensors, modelopt
from mpjax.checkpoint.schemes.base import Scheme, Specs
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

SHOWN_TARGETS = 2  # in a text; ModelOpt lists all modules


class Part(NamedTuple):
    """The scheme of the modules that targets name: in full, by a pattern, or as all others."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclasses.dataclass(frozen=True)
class MixedScheme(Scheme):
    """The schemes of a checkpoint's modules, two or more.

    has_cache_scales: see Scheme.
    """

    title: ClassVar[str] = "mixed-precision"
    methods: ClassVar[tuple[str, ...]] = (compressed_tensors.METHOD, modelopt.METHOD)
    suffixes: ClassVar[tuple[str, ...]] = ()

    parts: tuple[Part, ...]
    has_cache_scales: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MixedScheme:
        """Raises CheckpointError: `registry.read` reads the parts and calls the constructor."""
        raise CheckpointError(
            f"quant_method {checks.method_of(config)!r:.80}: expected modules in several formats"
        )

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """False: a module has the format of one of the parts."""
        return False

    @property
    def quant_method(self) -> str:
        """The `quant_method` of config.json."""
        return self.parts[0].scheme.quant_method

    @property
    def ignored(self) -> tuple[str, ...]:  # type: ignore[override]
        """Ends of names that any of the formats ignores."""
        return tuple(dict.fromkeys(end for part in self.parts for end in part.scheme.ignored))

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats of most modules of each part."""
        return tuple(dict.fromkeys(part.scheme.weights for part in self.parts))

    @property
    def weights(self) -> WeightFormat:
        """The format of the first part's modules."""
        return self.formats[0]

    def of_module(self, name: str) -> Scheme:
        """The scheme of a module. Raises CheckpointError where no part names it."""
        for targets, scheme in self.parts:
            if compressed_tensors.names(targets, name):
                return scheme
        for targets, scheme in self.parts:
            if compressed_tensors.LINEAR in targets:
                return scheme
        raise CheckpointError(
            f"{name} is quantised, but config.json names no format for it: config.json is of "
            "another checkpoint"
        )

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        return self.of_module(name).format(name, channels)

    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks a module's tensors by the scheme of the module."""
        return self.of_module(name).check(specs, name, shape)

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Decodes one module by its scheme."""
        return self.of_module(name).decode(tensors, name, shape)

    def dequantize(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> jax.Array:
        """The weight of one module by its scheme."""
        return self.of_module(name).dequantize(tensors, name, shape)

    @property
    def choices(self) -> tuple[MixedScheme, ...]:
        """Every combination of the parts' choices."""
        return tuple(
            self._with(schemes)
            for schemes in itertools.product(*(part.scheme.choices for part in self.parts))
        )

    @property
    def unsupported_activations(self) -> str | None:
        """The activations of the first part whose own are not implemented."""
        found = (part.scheme.unsupported_activations for part in self.parts)
        return next(filter(None, found), None)

    def for_experts(self) -> MixedScheme:
        """All parts as they are for experts."""
        return self._with([part.scheme.for_experts() for part in self.parts])

    @property
    def may_lack_cache_scales(self) -> bool:
        """Whether any part's scheme says so."""
        return any(part.scheme.may_lack_cache_scales for part in self.parts)

    @property
    def loss(self) -> str | None:
        """What the parts say of their rounding."""
        losses = dict.fromkeys(part.scheme.loss for part in self.parts if part.scheme.loss)
        return "; ".join(losses) or None

    @property
    def contents(self) -> str:
        """The text of each part, after its first targets."""
        parts = []
        for targets, scheme in self.parts:
            more = len(targets) - SHOWN_TARGETS
            shown = ", ".join(targets[:SHOWN_TARGETS]) + (f" and {more} more" if more > 0 else "")
            parts.append(f"{shown}: {scheme.contents}")
        return "; ".join(parts)

    def rounded_to(self, format: WeightFormat) -> MixedScheme | None:
        """All parts rounded to a format; None where the codes of one must stay."""
        schemes = [part.scheme.rounded_to(format) for part in self.parts]
        found = [scheme for scheme in schemes if scheme is not None]
        return self._with(found) if len(found) == len(schemes) else None

    @property
    def target(self) -> WeightFormat | None:
        """The format to which all parts are rounded."""
        targets = {part.scheme.target for part in self.parts}
        return targets.pop() if len(targets) == 1 else None

    def _with(self, schemes: Sequence[Scheme]) -> MixedScheme:
        parts = (
            part._replace(scheme=scheme) for part, scheme in zip(self.parts, schemes, strict=True)
        )
        return dataclasses.replace(self, parts=tuple(parts))


def split(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]] | None:
    """The targets and the `quantization_config` of each part; None for a config of one format.

    Raises CheckpointError for parts that can't be read.
    """
    method = checks.method_of(config)
    if method == compressed_tensors.METHOD:
        return compressed_tensors.split(config)
    if method == modelopt.METHOD:
        return modelopt.split(config)
    return None
