"""Cuts the parameters of a decoder into shares, one for each device, and joins the shares."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.cutting import (
    Run,
    cut_inputs,
    cut_outputs,
    cutting_unit,
    join_inputs,
    join_outputs,
    put_runs,
    require_cuttable,
    take_runs,
)
from mpjax.kernels.formats import WeightFormat
from mpjax.models.config import DecoderConfig
from mpjax.models.decoder import Decoder
from mpjax.models.layers import Linear
from mpjax.models.low_rank import LowRank
from mpjax.models.parameters import (
    EMBEDDING,
    OF_TOKENS,
    TABLES,
    ArrayPlace,
    ExpertPlace,
    LinearPlace,
)
from mpjax.models.share import Cut, ExpertDivision, HeadShares, Share, divide_config, share_size
from mpjax.models.window import Window


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Part:
    """The arrays of a Linear: a kernel, plain or packed, and a bias."""

    kernel: Any
    bias: Any = None

    @classmethod
    def of(cls, linear: Linear) -> Part:
        """The arrays of a Linear."""
        bias = None if linear.bias is None else linear.bias.get_value()
        return cls(linear.kernel.get_value(), bias)


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a decoder among devices; static and hashable.

    decoder: the family's class. config: of the whole model. local: of each share.
    count: the number of shares.
    """

    decoder: type[Decoder]
    config: DecoderConfig
    local: DecoderConfig
    count: int

    @classmethod
    def of(
        cls,
        decoder: type[Decoder],
        config: DecoderConfig,
        count: int,
        formats: Mapping[str, Sequence[WeightFormat | None]],
        experts: ExpertDivision = "divided",
    ) -> Division:
        """The division of a decoder whose linear maps have these formats.

        formats: by the path of each place of linear maps, such as `layers.0.mlp.down`, the formats
            of its kernels; None for plain ones.
        experts: as for `divide_config`.

        Raises ValueError for a model that can't be divided this way.
        """
        _require_experts(config, experts)
        units: list[dict[str, int]] = [{} for _ in config.layers]
        for path, found in formats.items():
            if path in TABLES:
                continue
            _, layer, inner = path.split(".", 2)
            units[int(layer)][inner] = max(cutting_unit(one) if one else 1 for one in found)
        division = cls(decoder, config, divide_config(config, count, units, experts), count)
        division._require_whole_arrays()
        for path, found in formats.items():
            division._require_cuttable(path, [one for one in found if one])
        return division

    def without_drafts(self) -> Division:
        """The division of the model without its layer that drafts."""
        config, local = self.config.without_drafts(), self.local.without_drafts()
        return dataclasses.replace(self, config=config, local=local)

    def with_drafts(
        self, config: DecoderConfig, formats: Mapping[str, Sequence[WeightFormat | None]]
    ) -> Division:
        """The division of the model with a layer that drafts after the others.

        config: of the whole model with it. formats: of that layer's maps, as for `of`.

        Raises ValueError for a layer that can't be divided this way.
        """
        layer = dataclasses.replace(config, layers=config.layers[-1:])
        moved = {f"layers.0.{path.split('.', 2)[2]}": found for path, found in formats.items()}
        alone = Division.of(self.decoder, layer, self.count, moved)
        local = dataclasses.replace(self.local, layers=(*self.local.layers, *alone.local.layers))
        return dataclasses.replace(self, config=config, local=local)

    def _require_cuttable(self, path: str, formats: Sequence[WeightFormat]) -> None:
        """Raises ValueError if a format can't be cut at the shares' input channels."""
        for format in formats if (runs := self._inputs(path)) else ():
            try:
                require_cuttable(format, runs)
            except ValueError as error:
                raise ValueError(f"{path} for {self.count} devices: {error}") from error

    def _require_whole_arrays(self) -> None:
        """Raises ValueError for an array whose shape differs in a share but that has no cut."""
        places = zip(
            self.decoder.array_places(self.config),
            self.decoder.array_places(self.local),
            strict=True,
        )
        for place, local in places:
            if place.shape != local.shape and self._cut(place.path, 0) is None:
                raise ValueError(
                    f"{place.path} {list(place.shape)} can't be divided among {self.count} devices "
                    f"of {list(local.shape)}: load the model on one device"
                )

    def runs_of_table(self) -> list[list[Run]]:
        """The token ids of each share."""
        size = share_size(self.config.vocab_size, self.count)
        return [[share.run(self.config.vocab_size, size)] for share in self._shares]

    def rows(self, place: ArrayPlace, numbers: Sequence[int]) -> Window | None:
        """The smallest window of a table with the rows of these shares; None for other arrays."""
        if place.path not in OF_TOKENS:
            return None
        runs = self.runs_of_table()
        return Window.around(False, [run for number in numbers for run in runs[number]])

    def cut_array(self, place: ArrayPlace, array: Any, number: int, begin: int = 0) -> Any:
        """One share of an array outside linear maps. begin: of a table, the array's first row."""
        if place.path in OF_TOKENS:
            return take_runs(array, [run.moved(-begin) for run in self.runs_of_table()[number]], 0)
        if (runs := self._runs_of_array(place)) is None:
            return array
        each, axis = runs
        return take_runs(array, each[number], axis)

    def join_array(self, place: ArrayPlace, shares: Sequence[Any]) -> Any:
        """Joins shares, the results of `cut_array`, to the whole array."""
        if place.path in OF_TOKENS:
            return put_runs(shares, self.runs_of_table(), 0)
        if (runs := self._runs_of_array(place)) is None:
            return shares[0]
        return put_runs(shares, *runs)

    def _runs_of_array(self, place: ArrayPlace) -> tuple[list[tuple[Run, ...]], int] | None:
        """Each share's runs along the axis along which an array is cut, and the axis; or None."""
        cuts = [self._cut(place.path, number) for number in range(self.count)]
        if rows := [cut.rows for cut in cuts if cut is not None and cut.rows is not None]:
            return rows, 0
        return (outputs, -1) if (outputs := self._outputs(place.path)) else None

    def windows(self, place: LinearPlace, numbers: Sequence[int]) -> list[Window]:
        """For each map of a place in the files, the smallest window with what these shares need.

        With whole experts, each map of an expert has a window of experts.
        """
        count = place.joined_maps
        if spread := self._experts(place.path):
            window = Window.around(False, [spread[number] for number in numbers])
            return [window._replace(is_of_experts=True)] * count
        if self.is_divided_along_inputs(place):
            runs = self._inputs(place.path)
            return [Window.around(True, [runs[number] for number in numbers])] * len(place.names)
        of_maps = [
            Window.around(False, [run for number in numbers for run in shares[number]])
            for shares in self._runs_of_parts(place, count)
        ]
        return of_maps * (len(place.names) // count)

    def is_divided_along_inputs(self, place: LinearPlace) -> bool:
        """Whether each share of a place's maps has only some of the input channels."""
        cut = self._cut(place.path, 0)
        return cut is not None and cut.inputs is not None

    def cut_linears(
        self,
        place: LinearPlace,
        parts: Sequence[Part],
        number: int,
        windows: Sequence[Window] | None = None,
    ) -> list[Part]:
        """One share of the linear maps of a place, with as many parts as `parts`.

        windows: the range of channels that `parts` have of each map in the files; None for all.
        """
        if spread := self._experts(place.path):
            mine = [spread[number].moved(-windows[0].begin if windows else 0)]
            return [jax.tree.map(lambda array: take_runs(array, mine, 0), part) for part in parts]
        if self.is_divided_along_inputs(place):
            runs, begin = self._inputs(place.path), windows[0].begin if windows else 0
            # An expert's bias is added before the sum over devices: only the first device has it.
            is_mine = number == 0 or not isinstance(place, ExpertPlace)
            return [
                Part(
                    _cut_inputs(part.kernel, runs, number, begin),
                    part.bias if is_mine or part.bias is None else part.bias * 0,
                )
                for part in parts
            ]
        each = self._runs_of_parts(place, len(parts), windows)
        return [
            Part(
                _cut_outputs(part.kernel, runs[number]),
                None if part.bias is None else take_runs(part.bias, runs[number], -1),
            )
            for part, runs in zip(parts, each, strict=True)
        ]

    def cut_change(self, path: str, change: LowRank, number: int, axis: str) -> LowRank:
        """One share of an adapter's change of the maps at a path, or of a stack of changes.

        axis: the mesh axis along which the products with `down` are summed if the inputs are
        divided. For experts, the sum over devices of the experts' outputs includes them.

        Raises ValueError for experts that are spread over the devices.
        """
        if self._experts(path):
            raise ValueError(f"{path} has whole experts on each device: load with divided experts")
        down, ups, gain = change.arrays
        inputs, outputs = self._inputs(path), self._outputs(path)
        if inputs:
            down = take_runs(down, [inputs[number]], -2)
            sums = None if ".experts." in path else axis
            return LowRank(down, ups, gain, is_stack=change.is_stack, axis=sums)
        if path == EMBEDDING or not outputs:
            return change
        runs = outputs[number]
        if gain is not None:
            sizes = [up.shape[-1] for up in ups]
            gains = np.split(gain, np.cumsum(sizes)[:-1], -1)
            own = [take_runs(one, [run], -1) for one, run in zip(gains, runs, strict=True)]
            gain = np.concatenate(own, -1)
        if not ups:
            down = take_runs(down, runs, -1)
        ups = [take_runs(up, [run], -1) for up, run in zip(ups, runs, strict=bool(ups))]
        return LowRank(down, ups, gain, is_stack=change.is_stack)

    def join_linears(
        self,
        place: LinearPlace,
        shares: Sequence[Sequence[Part]],
        formats: Sequence[WeightFormat | None],
    ) -> list[Part]:
        """Joins shares, the results of `cut_linears`, to the whole linear maps.

        shares: the parts of each device. formats: of the whole kernels.
        """
        if spread := self._experts(place.path):
            runs = [[run] for run in spread]
            pieces = zip(*shares, strict=True)
            return [
                jax.tree.map(lambda *arrays: put_runs(arrays, runs, 0), *parts) for parts in pieces
            ]
        along_inputs = self.is_divided_along_inputs(place)
        each = [] if along_inputs else self._runs_of_parts(place, len(formats))
        joined = []
        for index, format in enumerate(formats):
            kernels = [share[index].kernel for share in shares]
            biases = [share[index].bias for share in shares]
            if along_inputs:
                kernel = _join_inputs(kernels, self._inputs(place.path), format)
                bias = biases[0]
            else:
                kernel = _join_outputs(kernels, each[index])
                bias = None if biases[0] is None else put_runs(biases, each[index], -1)
            joined.append(Part(kernel, bias))
        return joined

    def cut_cache_scales(self, scales: Any, number: int) -> Any:
        """One share of a cache's scales [layers, 2, KV heads, ...], padded with ones."""
        [run] = self._runs_of_kv_heads()[number]
        found = np.ones((*scales.shape[:2], run.size, *scales.shape[3:]), np.float32)
        found[:, :, : run.length] = scales[:, :, run.begin : run.end]
        return found  # padded heads have scale 1, since 0 / 0 is NaN

    def join_cache_scales(self, shares: Sequence[Any]) -> Any:
        """Joins shares, the results of `cut_cache_scales`, to the whole scales."""
        return put_runs(shares, self._runs_of_kv_heads(), 2)

    def _runs_of_kv_heads(self) -> list[list[Run]]:
        heads = HeadShares(self.config.num_heads, self.config.num_kv_heads, self.count)
        return [[heads.runs(number)[1]] for number in range(self.count)]

    @property
    def _shares(self) -> list[Share]:
        return [Share(number, self.count) for number in range(self.count)]

    def _cut(self, path: str, number: int) -> Cut | None:
        """The cut of a parameter in a layer; None for a parameter that is whole on every device."""
        _, *found = path.split(".", 3)
        if not path.startswith("layers.") or len(found) < 3:
            return None
        layer, half, inner = found
        return _cuts(self, int(layer), half, number).get(inner)

    def _inputs(self, path: str) -> list[Run]:
        cuts = [self._cut(path, number) for number in range(self.count)]
        return [cut.inputs for cut in cuts if cut is not None and cut.inputs is not None]

    def is_spread(self, place: LinearPlace) -> bool:
        """Whether each share of a place's maps has only some of the experts."""
        return bool(self._experts(place.path))

    def experts(self, place: ExpertPlace) -> list[Run]:
        """The experts in each share: some of them if they are spread, else all (divided or not)."""
        everything = Run(0, place.experts, place.experts)
        return self._experts(place.path) or [everything] * self.count

    def _experts(self, path: str) -> list[Run]:
        cuts = [self._cut(path, number) for number in range(self.count)]
        return [cut.experts for cut in cuts if cut is not None and cut.experts is not None]

    def _outputs(self, path: str) -> list[tuple[Run, ...]]:
        if path in TABLES:
            return [tuple(runs) for runs in self.runs_of_table()]
        cuts = [self._cut(path, number) for number in range(self.count)]
        return [cut.outputs for cut in cuts if cut is not None and cut.outputs is not None]

    def _runs_of_parts(
        self, place: LinearPlace, count: int, windows: Sequence[Window] | None = None
    ) -> list[list[tuple[Run, ...]]]:
        """For each of `count` parts, each share's output channels as runs of that part.

        windows: the range of channels that the parts have of each map in the files; None for all.
        """
        shares, files = self._outputs(place.path), [n for _, n in place.shapes[: place.joined_maps]]
        in_files = [Window(False, 0, size) for size in files] if windows is None else windows
        begins = [0] * len(files)  # the first channel of each map of the files in its part
        if count == 1:
            begins = [0, *itertools.accumulate(window.length for window in in_files)]
        found: list[list[list[Run]]] = [[[] for _ in shares] for _ in range(count)]
        file = passed = 0
        for number, size in enumerate(self._sizes_of_maps(place)):
            if passed == files[file]:
                file, passed = file + 1, 0
            moved = begins[file] - in_files[file].begin + passed
            for runs, share in zip(found[file if count > 1 else 0], shares, strict=True):
                runs.append(share[number].moved(moved))
            passed += size
        return [[tuple(runs) for runs in part] for part in found]

    def _sizes_of_maps(self, place: LinearPlace) -> list[int]:
        """The output channels of each map of a place, even if files store the maps as one."""
        if place.is_table:
            return [outputs for _, outputs in place.shapes]
        _, layer, half, inner = place.path.split(".", 3)
        every = getattr(self.config.layers[int(layer)], half).linear_maps(self.config)
        [shapes] = [maps.shapes for maps in every if maps.path == inner]
        return [outputs for _, outputs in shapes]


def _require_experts(config: DecoderConfig, experts: ExpertDivision) -> None:
    """Raises ValueError if whole experts are requested for a model without experts."""
    mlps = (layer.mlp for layer in config.layers if layer.mlp)
    maps = (maps for mlp in mlps for maps in mlp.linear_maps(config))
    if experts == "whole" and all(each.experts is None for each in maps):
        raise ValueError("experts is 'whole', and the model has no experts: leave it out")


@functools.lru_cache(maxsize=1 << 12)
def _cuts(division: Division, layer: int, half: str, number: int) -> dict[str, Cut]:
    """The cuts of a layer's mixer or MLP, by path; {} for a norm between them."""
    spec = getattr(division.config.layers[layer], half, None)
    if spec is None:
        return {}
    local = getattr(division.local.layers[layer], half)
    return spec.cuts(division.config, local, Share(number, division.count))


def _cut_inputs(kernel: Any, runs: Sequence[Run], number: int, begin: int) -> Any:
    if isinstance(kernel, QuantizedTensor):
        return cut_inputs(kernel, runs, number, begin)
    return take_runs(kernel, [runs[number].moved(-begin)], -2)


def _join_inputs(kernels: Sequence[Any], runs: Sequence[Run], format: WeightFormat | None) -> Any:
    if format is None:
        return put_runs(kernels, [[run] for run in runs], -2)
    return join_inputs(kernels, runs, format)


def _cut_outputs(kernel: Any, runs: Sequence[Run]) -> Any:
    if isinstance(kernel, QuantizedTensor):
        return cut_outputs(kernel, runs)
    return take_runs(kernel, runs, -1)


def _join_outputs(kernels: Sequence[Any], runs: Sequence[Sequence[Run]]) -> Any:
    if isinstance(kernels[0], QuantizedTensor):
        return join_outputs(kernels, runs)
    return put_runs(kernels, runs, -1)
