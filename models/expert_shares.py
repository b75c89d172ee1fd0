"""Builds each device's share of a stack of experts while experts are loaded.

The stack of all experts, which takes gigabytes, never exists on one host or device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.formats import WeightFormat
from mpjax.models.division import Division, Part
from mpjax.models.parameters import ExpertPlace
from mpjax.models.stack import Stack
from mpjax.models.symmetry import shared_symmetry, with_symmetry
from mpjax.models.window import Window


class ExpertShares:
    """The shares of some devices in the experts of a place; `put` adds some experts at a time.

    division: the rules. devices: by the indices of their shares. windows: the channels or experts
    that `put` gets, as in `Division.cut_linears`; None for all.
    """

    def __init__(
        self,
        division: Division,
        place: ExpertPlace,
        devices: Mapping[int, jax.Device],
        windows: Sequence[Window] | None = None,
    ) -> None:
        self._division, self._place, self._windows = division, place, windows
        self._runs = division.experts(place)
        self._devices = devices
        self._stacks = {
            number: Stack(self._runs[number].size, device) for number, device in devices.items()
        }
        has_experts = windows is not None and windows[0].is_of_experts
        self._next = windows[0].begin if windows and has_experts else 0
        self.format: WeightFormat | None = None

    def put(self, part: Part) -> None:
        """Copies each device's share of the next experts [experts, ...] into its stack.

        Raises ValueError if their format is not that of the earlier experts.
        """
        begin, count = self._next, part.kernel.shape[0]
        name = self._place.names[begin * self._place.joined_maps]
        for number, device in self._devices.items():
            run = self._runs[number]
            first = min(max(run.begin - begin, 0), count)
            last = max(min(run.end - begin, count), first)
            share = jax.device_put(self._cut(part, number, slice(first, last)), device)
            place = max(begin - run.begin, 0)
            self._stacks[number].put((share.kernel, share.bias), place, name)
            # Without waiting, several shares could be in memory at once.
            jax.block_until_ready(self._stacks[number].arrays)
        if isinstance(part.kernel, QuantizedTensor):
            self.format = shared_symmetry([part.kernel.format, self.format or part.kernel.format])
        self._next = begin + count

    def part(self, number: int, format: WeightFormat | None) -> Part:
        """The share of a device, after all experts are put. format: its symmetry is taken over."""
        kernel, bias = self._stacks[number].arrays
        return Part(with_symmetry(kernel, format), bias)

    def _cut(self, part: Part, number: int, mine: slice) -> Part:
        """A device's share of a part. mine: its experts in the part, if experts are whole."""
        if self._division.is_spread(self._place):
            return jax.tree.map(lambda array: array[mine], part)
        [share] = self._division.cut_linears(self._place, [part], number, self._windows)
        return share
