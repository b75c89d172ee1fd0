"""Shares of linear maps that are made of windows, against those of whole maps."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.checkpoint import convert, huggingface
from mpjax.models.division import Division, Part
from mpjax.models.sharded import on_host_of_cpu
from mpjax.precision import Precision
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    FP8,
    GPTQ,
    compressed_fp8,
    compressed_integers,
)
from tests.mpjax.on_devices import ACT_ORDER, write, write_experts
from tests.sweeps import in_sweep


class Shares:
    """Takes the parameters of `fill`, and cuts the shares of some devices out of them.

    own: whether windows around these shares are asked for, in the place of whole parameters.
    """

    def __init__(self, division: Division, numbers: tuple[int, ...], *, own: bool):
        self.division, self.numbers, self.own, self.found = division, numbers, own, {}

    def windows(self, place):
        return self.division.windows(place, self.numbers) if self.own else None

    def rows(self, place):
        return self.division.rows(place, self.numbers) if self.own else None

    def put_array(self, place, array, rows):
        begin = 0 if rows is None else rows.begin
        for number in self.numbers:
            cut = self.division.cut_array(place, np.asarray(array), number, begin)
            self.found[place.path, number] = cut

    def put_linears(self, place, parts, windows):
        held = [on_host_of_cpu(Part.of(part)) for part in parts]
        for number in self.numbers:
            cut = self.division.cut_linears(place, held, number, windows)
            self.found[place.path, number] = cut


@pytest.fixture
def filled(monkeypatch):
    """The shares of some devices, and the bytes of tensors that were brought to the device."""
    counted, to_device = [], convert.to_device

    def count(array):
        counted.append(array.nbytes)
        return to_device(array)

    monkeypatch.setattr(convert, "to_device", count)

    def fill(folder, precision, count, numbers, *, own, experts="divided"):
        arguments = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(huggingface, "fill", lambda *given: arguments.extend(given))
            precision = None if precision is None else Precision.parse(precision)
            huggingface.load(folder, precision=precision, dtype="float32", progress=False)
        model, checkpoint, plan, _ = arguments
        formats = {place.path: [each.format for each in sources] for place, sources in plan.linears}
        division = Division.of(type(model), model.config, count, formats, experts)
        shares = Shares(division, numbers, own=own)
        counted.clear()
        huggingface.fill(shares, checkpoint, plan)
        return shares.found, sum(counted)

    return fill


@pytest.mark.parametrize(
    ("written", "precision", "most"),
    [
        (None, "W32A32KV16", 0.52),
        (None, "W4g32A32KV16", 0.56),  # blocks of 256 channels
        in_sweep(None, "W4A8KV16", 0.72),  # scales of whole channels: output and down are whole
        in_sweep(AWQ, None, 0.54),
        in_sweep(GPTQ, None, 0.54),
        in_sweep(GPTQ | {"desc_act": True}, None, 0.54),  # whose groups are in order
        in_sweep(GPTQ | {"sym": None}, None, 1.0),  # all zero points decide together
        (ACT_ORDER, None, 0.8),  # output and down are whole
        in_sweep(FP8, "WFP8g128A16KV16", 0.61),
        (compressed_fp8("channel", "token"), None, 0.54),
        (compressed_integers(), None, 0.54),
    ],
)
def test_a_process_of_two_reads_its_windows(written, precision, most, filled, tmp_path):
    folder = write(tmp_path, "llama", written)
    whole, everything = filled(folder, precision, 2, (0, 1), own=False)
    for number in (0, 1):
        found, counted = filled(folder, precision, 2, (number,), own=True)
        assert counted <= most * everything, counted / everything
        for key, share in found.items():
            jax.tree.map(np.testing.assert_array_equal, share, whole[key])


def test_windows_are_those_of_several_devices(filled, tmp_path):
    """The third of four processes has two of eight devices, the last of which has no KV head."""
    folder = write(tmp_path, "llama", None)
    whole, everything = filled(folder, "W4g32A32KV16", 8, tuple(range(8)), own=False)
    for numbers in ((4, 5), (6, 7)):
        found, counted = filled(folder, "W4g32A32KV16", 8, numbers, own=True)
        assert counted < 0.45 * everything
        for key, share in found.items():
            jax.tree.map(np.testing.assert_array_equal, share, whole[key])


@pytest.mark.sweep
def test_a_process_reads_its_experts_where_they_are_whole(filled, tmp_path):
    """Two of four experts, and the halves of attention."""
    folder = write_experts(tmp_path)
    whole, everything = filled(folder, None, 2, (0, 1), own=False, experts="whole")
    for number in (0, 1):
        found, counted = filled(folder, None, 2, (number,), own=True, experts="whole")
        assert counted <= 0.55 * everything
        for key, share in found.items():
            jax.tree.map(np.testing.assert_array_equal, share, whole[key])
