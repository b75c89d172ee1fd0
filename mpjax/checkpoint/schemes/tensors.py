"""Types for a quantised module's tensors: descriptions, arrays and axes."""

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
    """An axis of a tensor. channels: the number of channels per entry."""

    number: int
    channels: int = 1


class Axes(NamedTuple):
    """The axes of a tensor along the input and the output channels; None for no such axis."""

    inputs: Axis | None = None
    outputs: Axis | None = None
