"""A window of channels or experts, which a process reads instead of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mpjax.kernels.cutting import Run


class Window(NamedTuple):
    """A range of the input or the output channels of a linear map, with all of the others.

    is_of_inputs: whether they are input channels. is_of_experts: whether they are no channels, but
    experts of a stack.
    """

    is_of_inputs: bool
    begin: int
    end: int
    is_of_experts: bool = False

    @classmethod
    def around(cls, is_of_inputs: bool, runs: Iterable[Run]) -> Window:
        """The smallest window with all of some runs.

        If all are empty, it is the first place, since a device without a share still reads one.
        """
        filled = [run for run in runs if run.length] or [Run(0, 1, 1)]
        return cls(is_of_inputs, min(run.begin for run in filled), max(run.end for run in filled))

    @property
    def length(self) -> int:
        """The number of its channels, or experts."""
        return self.end - self.begin

    def widened(self, unit: int, channels: int) -> Window:
        """The window from one multiple of a unit to another, or to the last of `channels`."""
        begin, end = self.begin // unit * unit, -(-self.end // unit) * unit
        return self._replace(begin=begin, end=min(end, channels))

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of a map (inputs, outputs) with these channels alone."""
        inputs, outputs = shape
        return (self.length, outputs) if self.is_of_inputs else (inputs, self.length)
