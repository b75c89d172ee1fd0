"""A window of channels or experts: the range of a tensor that a process needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mpjax.kernels.cutting import Run


class Window(NamedTuple):
    """A range of a linear map's input or output channels, or of a stack's experts.

    is_of_inputs: whether it is a range of input channels. is_of_experts: whether it is a range of
    experts instead of channels.
    """

    is_of_inputs: bool
    begin: int
    end: int
    is_of_experts: bool = False

    @classmethod
    def around(cls, is_of_inputs: bool, runs: Iterable[Run]) -> Window:
        """The smallest window that contains all runs.

        If all runs are empty, it is index 0, since a device without a share still loads something.
        """
        filled = [run for run in runs if run.length] or [Run(0, 1, 1)]
        return cls(is_of_inputs, min(run.begin for run in filled), max(run.end for run in filled))

    @property
    def length(self) -> int:
        """The number of channels or experts in the window."""
        return self.end - self.begin

    def widened(self, unit: int, channels: int) -> Window:
        """The window widened to multiples of `unit`, with `channels` as the upper limit."""
        begin, end = self.begin // unit * unit, -(-self.end // unit) * unit
        return self._replace(begin=begin, end=min(end, channels))

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape (inputs, outputs) of a map with only these channels."""
        inputs, outputs = shape
        return (self.length, outputs) if self.is_of_inputs else (inputs, self.length)
