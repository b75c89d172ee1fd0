"""Reads an adapter's folder: PEFT's, also as Unsloth writes it, or MLX's.

Every tensor is held against the base model: its module, its shape, its numbers.
"""

from __future__ import annotations

import collections
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpjax.adapters.collection import Adapter
from mpjax.adapters.sites import Group, Site, base_matrix, find_sites
from mpjax.checkpoint.adapters.config import NAME, AdapterConfig
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo, read_header
from mpjax.checkpoint.text_model import own_name
from mpjax.errors import CheckpointError
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank

WEIGHTS, WEIGHTS_OF_MLX = "adapter_model.safetensors", "adapters.safetensors"
# What a tensor is, by the end of its name. PEFT writes no adapter's name behind these today.
KINDS = {
    r"\.lora_A(\.default)?\.weight": "down",
    r"\.lora_B(\.default)?\.weight": "up",
    r"\.lora_embedding_A(\.default)?": "down",
    r"\.lora_embedding_B(\.default)?": "up",
    r"\.lora_magnitude_vector(\.default)?(\.weight)?": "magnitude",
    r"\.base_layer\.weight": "copy",
    r"(\.modules_to_save(\.default)?)?\.weight": "whole",
}
KINDS_OF_MLX = {r"\.lora_a": "down", r"\.lora_b": "up", r"\.m": "magnitude"}
NEARLY = 0.1  # the relative error up to which a table may be one that the base has packed


Module = dict[str, np.ndarray]  # a module's arrays, by their kinds


def read_adapter(folder: str | os.PathLike[str], model: Decoder) -> Adapter:
    """The adapter of a folder, for a base model.

    Raises CheckpointError, with the file, the key or the tensor, for what can't be read, is not
    supported, or does not fit the base.
    """
    try:
        path = Path(folder).expanduser()
        if not path.is_dir() or not os.path.lexists(path / NAME):
            raise CheckpointError(f"{path} has no {NAME}: expected the folder of an adapter")
        config = AdapterConfig.read(path)
        checkpoint = _open(path, config)
    except (OSError, RuntimeError) as error:  # of a home that nobody has, or a folder of others
        raise CheckpointError(f"{folder!s:.200}: {error}") from error
    try:
        return _Reader(config, checkpoint, model).read()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open(folder: Path, config: AdapterConfig) -> Checkpoint:
    file = folder / (WEIGHTS_OF_MLX if config.is_mlx else WEIGHTS)
    if not os.path.lexists(file):
        found = sorted(each.name for each in folder.iterdir())
        hint = "; PyTorch's files are not read: save the adapter as safetensors"
        raise CheckpointError(
            f"{folder} has no {file.name}, and found {', '.join(found[:5])}"
            f"{hint if any(name.endswith('.bin') for name in found) else ''}"
        )
    return Checkpoint(folder, read_header(file))


def parameter_of(name: str, site: Site) -> str:
    """The name by which patterns find a module; of experts in a stack, that of the parameter."""
    if site.group.experts is None or site.expert is not None:
        return name
    leaf = "down_proj" if site.group.path.endswith("down") else "gate_up_proj"
    return f"{name.removesuffix('.base_layer')}.{leaf}"


class _Reader:
    """Reads the tensors of one adapter."""

    def __init__(self, config: AdapterConfig, checkpoint: Checkpoint, model: Decoder) -> None:
        self.config, self.checkpoint, self.model = config, checkpoint, model
        self.sites = find_sites(model)
        self.arrays = {
            place.name.removesuffix(".weight"): place
            for place in model.array_places(model.config)
            if place.path.endswith("norm.weight")
        }

    def read(self) -> Adapter:
        """The adapter."""
        by_group: dict[str, dict[tuple[Site, str], Module]] = collections.defaultdict(dict)
        arrays = {}
        for name, kinds in self._modules().items():
            if (place := self.arrays.get(name)) is not None and set(kinds) == {"whole"}:
                [info] = kinds.values()
                self._require(info, place.shape)
                arrays[place.path] = self._array(info) + np.float32(place.offset)
                continue
            site = self._site(name, kinds)
            by_group[site.group.path][site, name] = self._module(name, site, kinds)
        changes = {}
        for path, modules in by_group.items():
            if (change := self._change(modules)) is not None:
                changes[path] = change
        if not changes and not arrays:
            raise CheckpointError("the file has no change of any module")
        return Adapter(changes, arrays)

    def _modules(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each module, by their kinds."""
        kinds = KINDS_OF_MLX if self.config.is_mlx else KINDS
        found: dict[str, dict[str, TensorInfo]] = collections.defaultdict(dict)
        for name, info in self.checkpoint.tensors.items():
            inner = own_name(name.removeprefix("base_model.model."))
            for pattern, kind in kinds.items():
                if match := re.search(f"(?:{pattern})$", inner):
                    module = inner[: match.start()]
                    if kind in found[module]:
                        raise CheckpointError(f"{name} comes twice")
                    found[module][kind] = info
                    break
            else:
                raise CheckpointError(f"{name} is no tensor of an adapter that is supported")
        return found

    def _site(self, name: str, kinds: Mapping[str, TensorInfo]) -> Site:
        """The site of a module. Where experts have two in one stack, shapes tell which it is."""
        sites = self.sites.get(name.removesuffix(".base_layer"), [])
        if len(sites) > 1 and "down" in kinds:
            width = kinds["down"].shape[-1:]
            sites = [site for site in sites if width == (site.group.inputs,)] or sites
            if len(sites) > 1:  # the inner of two wrappers is that of the first map
                sites = [sites[0 if name.endswith(".base_layer") else -1]]
        if not sites:
            close = difflib.get_close_matches(name, self.sites, n=1)
            hint = f"; the nearest is {close[0]}" if close else ""
            raise CheckpointError(
                f"{next(iter(kinds.values())).name} changes {name}, and the base has no such "
                f"linear map{hint}"
            )
        return sites[0]

    def _module(self, name: str, site: Site, kinds: Mapping[str, TensorInfo]) -> Module:
        """The arrays of a module: down [in, rank], up [rank, out], with an axis of experts."""
        found = Module()
        factors = [kind for kind in ("down", "up") if kind in kinds]
        if (info := kinds.get("copy", kinds.get("whole"))) is not None:
            change = self._table(info, site.group, is_copy="copy" in kinds)
            if change is not None:
                found["whole"] = change
        if found and factors:
            raise CheckpointError(f"{name} has a whole table beside lora_A: expected one of both")
        if not factors and "magnitude" not in kinds:
            return found
        if len(factors) < 2:
            raise CheckpointError(f"{name} lacks lora_A or lora_B: expected both")
        return found | self._factors(name, site, kinds)

    def _factors(self, name: str, site: Site, kinds: Mapping[str, TensorInfo]) -> Module:
        """The factors of a module, scaled, and its magnitude if it has one."""
        group = site.group
        is_stack = group.experts is not None and site.expert is None
        known = parameter_of(name, site)
        rank, count = self.config.rank_of(known), (group.experts or 1) if is_stack else 1
        shapes = (rank * count, group.inputs), (site.outputs, rank * count)
        if self.config.is_mlx:
            shapes = shapes[0][::-1], shapes[1][::-1]
        for kind, shape in zip(("down", "up"), shapes, strict=True):
            self._require(kinds[kind], shape)
        down, up = (self._array(kinds[kind]) for kind in ("down", "up"))
        if not self.config.is_mlx:
            down, up = down.T, up.T
        up = up * np.float32(self.config.scale_of(known))
        if is_stack:
            # Experts change slowest in the ranks of the first factor, and fastest in the second's.
            down = np.moveaxis(down.reshape(group.inputs, count, rank), 1, 0)
            up = np.moveaxis(up.reshape(rank, count, site.outputs), 1, 0)
        if group.alternates and site.count > 1:
            up = np.concatenate([up[..., 0::2], up[..., 1::2]], -1)
        found = {"down": down, "up": up}
        magnitude = kinds.get("magnitude")
        if self.config.dora and magnitude is None:
            raise CheckpointError(f"{name} lacks lora_magnitude_vector, and use_dora is true")
        if magnitude:
            if group.experts is not None or group.place is None:
                raise CheckpointError(f"{magnitude.name}: DoRA of {name} is not supported")
            self._require(magnitude, (site.outputs,))
            found["magnitude"] = self._array(magnitude)
        return found

    def _table(self, info: TensorInfo, group: Group, *, is_copy: bool) -> np.ndarray | None:
        """What a whole table adds to the base's, [in, out]; None for a copy of the base's own."""
        if group.place is not None or group.experts is not None:
            raise CheckpointError(f"{info.name} is a whole linear map: expected LoRA of it")
        is_head = group.path == "head"
        ids, hidden = (group.inputs, group.sizes[0])[:: -1 if is_head else 1]
        if info.shape != (ids, hidden):
            raise CheckpointError(
                f"{info.name} has the shape {info.shape}, and the base's table {(ids, hidden)}: "
                "extra tokens are not supported"
            )
        whole = self._array(info)
        base = base_matrix(self.model, group)
        change = (whole.T if is_head else whole) - base
        if not is_copy:
            return change
        if np.linalg.norm(change) > NEARLY * np.linalg.norm(base):
            raise CheckpointError(f"{info.name} is not the base's own table: take its own base")
        return None

    def _change(self, modules: Mapping[tuple[Site, str], Module]) -> LowRank | None:
        """The changes of all maps of a group."""
        [group] = {id(site.group): site.group for site, _ in modules}.values()
        wholes = [module["whole"] for module in modules.values() if "whole" in module]
        if wholes:
            return LowRank(wholes[0], ())
        factors = {key: module for key, module in modules.items() if "down" in module}
        if not factors:
            return None
        rank = max(module["down"].shape[-1] for module in factors.values())
        axes = () if group.experts is None else (group.experts,)
        down = np.zeros((*axes, group.inputs, len(group.sizes), rank), np.float32)
        ups = [np.zeros((*axes, rank, size), np.float32) for size in group.sizes]
        taken: set[tuple[int | None, int]] = set()
        for (site, name), module in factors.items():
            own, at = module["down"].shape[-1], 0
            mine = () if site.expert is None else site.expert
            for number in range(site.first, site.first + site.count):
                others = {expert for expert, other in taken if other == number}
                if others & {site.expert, None} or (others and site.expert is None):
                    raise CheckpointError(f"{name} is changed twice, by a module of several maps")
                taken.add((site.expert, number))
                size = group.sizes[number]
                down[mine][..., number, :own] = module["down"]
                ups[number][mine][..., :own, :] = module["up"][..., at : at + size]
                at += size
        gain = self._gain(group, factors, down, ups)
        return LowRank(down.reshape(*down.shape[:-2], -1), ups, gain)

    def _gain(
        self,
        group: Group,
        modules: Mapping[tuple[Site, str], Module],
        down: np.ndarray,
        ups: list[np.ndarray],
    ) -> np.ndarray | None:
        """DoRA's relative change of the base's products; `ups` are scaled in place by it.

        An output channel's weights get the length that its magnitude says.
        """
        if not any("magnitude" in module for module in modules.values()):
            return None
        base = base_matrix(self.model, group)
        starts = np.cumsum([0, *group.sizes])
        gain = np.zeros(starts[-1], np.float32)
        for (site, _), module in modules.items():
            if "magnitude" not in module:
                continue
            at = 0
            for number in range(site.first, site.first + site.count):
                columns, size = slice(*starts[number : number + 2]), group.sizes[number]
                weight = base[:, columns] + down[:, number] @ ups[number]
                ratio = module["magnitude"][at : at + size] / np.linalg.norm(weight, axis=0)
                gain[columns] = ratio - 1
                ups[number] *= ratio
                at += size
        return gain

    def _array(self, info: TensorInfo) -> np.ndarray:
        found = self.checkpoint.read(info.name)
        if not np.issubdtype(found.dtype, np.floating) and found.dtype.name not in (
            *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
        ):
            raise CheckpointError(f"{info.name} is {found.dtype}: expected floating point")
        wide = found.astype(np.float32)
        if not np.isfinite(wide).all():
            raise CheckpointError(f"{info.name} has numbers that are not finite")
        return wide

    def _require(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        if info.shape != shape:
            raise CheckpointError(
                f"{info.name} has the shape {info.shape}: expected {shape}, by {NAME} and the base"
            )
