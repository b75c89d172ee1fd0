"""The division of a decoder among devices: shares of heads, channels and the vocabulary.

Attention is divided by heads, the MLP by its intermediate channels, and embedding and head by token
ids. Norms are whole in each share. Uneven sizes are padded with zeros (heads, channels and ids),
which don't change results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from mpjax.kernels.cutting import Run

if TYPE_CHECKING:
    from mpjax.models.config import DecoderConfig, MLPSpec

ExpertDivision = Literal["divided", "whole"]


@dataclasses.dataclass(frozen=True)
class Share:
    """One of `count` shares of a model. number: its index."""

    number: int
    count: int

    def run(self, total: int, size: int) -> Run:
        """This share's range of an axis of length `total`; each share has at most `size` of it."""
        return Run(min(self.number * size, total), min((self.number + 1) * size, total), size)


class Cut(NamedTuple):
    """A share's part of linear maps of one input, or of an array outside linear maps.

    inputs: the input channels; None for all. The products of all shares are then summed.
    outputs: the output channels of each map, or the range of an array's last axis; None for all.
    experts: the experts, with all of their channels; None for all experts.
    rows: the ranges of an array's first axis; None for all.
    """

    inputs: Run | None = None
    outputs: tuple[Run, ...] | None = None
    experts: Run | None = None
    rows: tuple[Run, ...] | None = None


def share_size(total: int, count: int, unit: int = 1) -> int:
    """The size of each of `count` shares of `total`, a multiple of `unit`."""
    return -(-total // (count * unit)) * unit


@dataclasses.dataclass(frozen=True)
class HeadShares:
    """The division of attention heads among `count` devices.

    With fewer KV heads than devices, several devices have a copy of a KV head and of its cache, and
    each of them has some of the query heads that use it.

    heads, kv_heads: of the whole model.
    """

    heads: int
    kv_heads: int
    count: int

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def copies(self) -> int:
        """The number of devices among which one KV head's query heads are divided."""
        return max(self.count // self.kv_heads, 1)

    @property
    def local(self) -> tuple[int, int]:
        """The numbers of query heads and of KV heads in each share.

        Raises ValueError if devices with the same KV head would have unequal numbers of query
        heads.
        """
        if self.count <= self.kv_heads:
            keys = share_size(self.kv_heads, self.count)
            return keys * self.group, keys
        queries = share_size(self.group, self.copies)
        if self.group % queries:
            raise ValueError(
                f"{self.heads} heads for {self.kv_heads} heads of keys can't be divided among "
                f"{self.count} devices: {self.copies} devices would share the {self.group} heads "
                f"of a KV head; choose a number of devices up to {self.kv_heads}, or of which "
                f"{self.kv_heads} times a divisor of {self.group}"
            )
        return queries, 1

    @property
    def holders(self) -> int:
        """The number of devices that have query heads of one KV head, and so a copy of it."""
        return 1 if self.count <= self.kv_heads else self.group // self.local[0]

    def runs(self, number: int) -> tuple[Run, Run]:
        """The query heads and the KV heads of a share."""
        queries, keys = self.local
        if self.count <= self.kv_heads:
            kept = Share(number, self.count).run(self.kv_heads, keys)
            return kept.times(self.group), kept
        head, part = divmod(number, self.copies)
        if head >= self.kv_heads or part * queries >= self.group:
            # A device without query heads has no KV head either.
            return Run(self.heads, self.heads, queries), Run(self.kv_heads, self.kv_heads, 1)
        begin = head * self.group + part * queries
        return Run(begin, begin + queries, queries), Run(head, head + 1, 1)


def divide_config(
    config: DecoderConfig,
    count: int,
    units: Sequence[Mapping[str, int]],
    experts: ExpertDivision = "divided",
) -> DecoderConfig:
    """The configuration of one device's share of a decoder.

    units: for each layer, by the path of a linear map (such as `mlp.down`), the number of input
    channels at multiples of which its format can be cut. The vocabulary keeps its size.
    experts: whether a share has a part of each expert (`divided`), or some experts (`whole`).

    Raises ValueError for a layer that can't be divided this way.
    """
    heads, kv_heads = HeadShares(config.num_heads, config.num_kv_heads, count).local
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=layer.attention
            and layer.attention.divide(count, _of_half(unit, "attention")),
            mlp=layer.mlp and _divide_mlp(layer.mlp, experts)(count, _of_half(unit, "mlp")),
        )
        for layer, unit in zip(config.layers, units, strict=True)
    )
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, layers=layers)


def _divide_mlp(spec: MLPSpec, experts: ExpertDivision) -> Callable[..., MLPSpec]:
    return spec.divide if experts == "divided" else spec.spread


def _of_half(units: Mapping[str, int], half: str) -> dict[str, int]:
    """The units (`divide_config`) of a layer's mixer or MLP, by the paths inside it."""
    return {
        path.removeprefix(f"{half}."): unit
        for path, unit in units.items()
        if path.startswith(f"{half}.")
    }
