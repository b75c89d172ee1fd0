"""A quantised module's tensors by suffix: their descriptions and their axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class TensorSpec(Protocol):
    """Anything with a shape and a dtype: a TensorInfo, an array, a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dimensions."""

    @property
    def dtype(self) -> Any:
        """The tensor's numpy dtype."""


Specs = Mapping[str, TensorSpec]  # a module's tensors, or their descriptions, by suffix
Tensors = Mapping[str, Any]  # a module's arrays by suffix
Shape = tuple[int, int]  # of a weight: its input and output channels


class Axis(NamedTuple):
    """An axis of a tensor, each of whose entries belongs to so many channels."""

    number: int
    channels: int = 1


class Axes(NamedTuple):
    """The axes of a tensor along the input and the output channels; None where it has none."""

    inputs: Axis | None = None
    outputs: Axis | None = None
