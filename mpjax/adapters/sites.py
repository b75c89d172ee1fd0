"""Maps module names in adapter files to a model's linear maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.errors import CheckpointError
from mpjax.kernels import QuantizedTensor
from mpjax.models import Decoder, DecoderConfig, ExpertPlace, Linear, LinearMaps, LinearPlace
from mpjax.models.gathered import gather
from mpjax.models.parameters import EMBEDDING, HEAD, name_of
from mpjax.models.sharded import ShardedDecoder

# Names of separate modules → name of the fused module in some checkpoints.
JOINT = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}


@dataclasses.dataclass(frozen=True)
class Group:
    """The linear maps that read one input and share a LowRank.

    path: in the Decoder. inputs: input channels. sizes: output channels of each map. experts:
    number of experts; None for maps without experts. alternates: whether files interleave the
    outputs of an expert's gate and up. place: the maps' LinearPlace; None for a table.
    """

    path: str
    inputs: int
    sizes: tuple[int, ...]
    experts: int | None = None
    alternates: bool = False
    place: LinearPlace | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    """A module of the files: a contiguous range of a group's maps.

    first, count: the range. expert: index of the expert; None for a module of all experts, and
    without experts.
    """

    group: Group
    first: int
    count: int
    expert: int | None = None

    @property
    def outputs(self) -> int:
        """The output channels of the module."""
        return sum(self.group.sizes[self.first : self.first + self.count])


def find_sites(model: Decoder) -> dict[str, list[Site]]:
    """The sites of each module name of a model; a fused stack of experts has two, in order."""
    config, found = model.config, dict[str, list[Site]]()
    places = {place.path: place for place in model.linear_places(config)}
    for number, layer in enumerate(config.layers):
        for half, spec in (("attention", layer.attention), ("mlp", layer.mlp)):
            for maps in () if spec is None else spec.linear_maps(config):
                place = places[f"layers.{number}.{half}.{maps.path}"]
                for name, site in _sites_of(place, maps):
                    found.setdefault(name, []).append(site)
    for path, inputs, outputs in _tables(config):
        name = name_of(model.names, path).removesuffix(".weight")
        found[name] = [Site(Group(path, inputs, (outputs,)), 0, 1)]
    return found


def _tables(config: DecoderConfig) -> list[tuple[str, int, int]]:
    """(path, input channels, output channels) of the changes of embedding and head."""
    hidden, ids = config.hidden_size, config.vocab_size
    return [(EMBEDDING, ids, hidden), (HEAD, hidden, ids)]


def _sites_of(place: LinearPlace, maps: LinearMaps) -> list[tuple[str, Site]]:
    sizes = tuple(outputs for _, outputs in maps.shapes)
    group = Group(
        *(place.path, maps.shapes[0][0], sizes, maps.experts, maps.is_alternating, place),
    )
    names = place.names
    if isinstance(place, ExpertPlace):
        each = place.joined_maps
        count = len(sizes) // each
        of_experts = [
            (name, Site(group, index % each * count, count, index // each))
            for index, name in enumerate(names)
        ]
        parent, _, own = names[0].partition(".experts.")
        if own.endswith((".w1", ".w2")):  # transformers names Mixtral's experts so
            parent = parent.replace(".block_sparse_moe", ".mlp")
        return [*of_experts, (f"{parent}.experts", Site(group, 0, len(sizes)))]
    parent, _, leaf = names[0].rpartition(".")
    leaves = tuple(name.rpartition(".")[2] for name in names)
    found = []
    for parts, joint in JOINT.items():
        if len(parts) == len(sizes) and (leaves == parts or leaf == joint):
            found = [(f"{parent}.{part}", Site(group, i, 1)) for i, part in enumerate(parts)]
            found.append((f"{parent}.{joint}", Site(group, 0, len(sizes))))
    if not found and len(names) == len(sizes):
        found = [(name, Site(group, i, 1)) for i, name in enumerate(names)]
    return found or [(names[0], Site(group, 0, len(sizes)))]


def require_runnable(model: Decoder, what: str, paths: Collection[str], hint: str) -> None:
    """Raises ValueError if a path is of maps beside which no adapter runs (`LinearMaps.is_plain`).

    what, hint: the sentence's beginning and its end.
    """
    for place in model.linear_places(model.config):
        if place.is_plain and place.path in paths:
            raise ValueError(
                f"{what} {place.names[0]}, whose weights are also read apart from the map, where "
                f"no adapter is added: {hint}"
            )


def whole(model: Decoder) -> Decoder:
    """The undivided model, for `base_matrix`; a divided model's arrays are joined when read.

    Raises CheckpointError if other processes hold some of the shares.
    """
    if not isinstance(model, ShardedDecoder):
        return model
    try:
        return model.whole()
    except ValueError as error:
        raise CheckpointError(f"an adapter's change reads the base's weights: {error}") from error


def base_matrix(model: Decoder, group: Group) -> np.ndarray:
    """The base's weights of a group without experts, float32 [in, out of all maps].

    model: as returned by `whole`.
    """
    if group.place is not None:
        kernels = group.place.kernels(model)
        return np.concatenate([_dense(kernel) for kernel in kernels], axis=-1)
    table: Any = model.embedding if group.path == EMBEDDING or model.head is None else model.head
    rows = (
        _dense(table.kernel.get_value()).T
        if isinstance(table, Linear)
        else _dense(table.get_value())
    )
    return rows if group.path == EMBEDDING else rows.T


def _dense(kernel: Any) -> np.ndarray:
    kernel = gather(kernel)
    if isinstance(kernel, QuantizedTensor):
        return np.asarray(kernel.dequantize(jnp.float32))
    return np.asarray(kernel, np.float32)
