"""Reads an adapter folder of PEFT (or Unsloth) or MLX.

Each tensor's module and shape are checked against the base model, and its values are finite.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpjax.adapters.collection import Adapter
from mpjax.adapters.sites import Group, Site, base_matrix, find_sites, whole
from mpjax.checkpoint.adapters.config import NAME, AdapterConfig
from mpjax.checkpoint.folder import TOKENIZER_NAME
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo, read_header
from mpjax.checkpoint.text_model import own_name
from mpjax.errors import CheckpointError
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank
from mpjax.models.parameters import EMBEDDING, HEAD, name_of
from mpjax.text.tokenizer import Tokenizer

WEIGHTS, WEIGHTS_OF_MLX = "adapter_model.safetensors", "adapters.safetensors"
# The kind of a tensor, by the end of its name. Older PEFT versions add the name `default`.
KINDS = {
    r"\.lora_A(\.default)?\.weight": "down",
    r"\.lora_B(\.default)?\.weight": "up",
    r"\.lora_embedding_A(\.default)?": "down",
    r"\.lora_embedding_B(\.default)?": "up",
    r"\.lora_magnitude_vector(\.default)?(\.weight)?": "magnitude",
    r"\.token_adapter\.trainable_tokens_delta(\.default)?": "tokens",
    r"\.base_layer\.weight": "copy",
    r"(\.modules_to_save(\.default)?)?\.weight": "whole",
}
KINDS_OF_MLX = {r"\.lora_a": "down", r"\.lora_b": "up", r"\.m": "magnitude"}
NEARLY = 0.1  # relative error up to which a saved table counts as a copy of the base's packed table


Module = dict[str, np.ndarray]  # a module's arrays, by kind


def read_adapter(folder: str | os.PathLike[str], model: Decoder) -> Adapter:
    """Reads the adapter in a folder, for a base model.

    Raises CheckpointError, which names the file, key or tensor, if it is unreadable, unsupported,
    or doesn't fit the base model.
    """
    try:
        path = Path(folder).expanduser()
        if not path.is_dir() or not os.path.lexists(path / NAME):
            raise CheckpointError(f"{path} has no {NAME}: expected the folder of an adapter")
        config = AdapterConfig.read(path)
        checkpoint = _open(path, config)
    except (OSError, RuntimeError) as error:  # an unknown home folder, or no permission
        raise CheckpointError(f"{folder!s:.200}: {error}") from error
    try:
        return _Reader(config, checkpoint, model, path).read()
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
    """The name that patterns match: of the module or, for a stack of experts, of its parameter."""
    if site.group.experts is None or site.expert is not None:
        return name
    leaf = "down_proj" if site.group.path.endswith("down") else "gate_up_proj"
    return f"{name.removesuffix('.base_layer')}.{leaf}"


def _ids(site: Site) -> int:
    """The number of token ids of a table's site."""
    group = site.group
    return group.sizes[0] if group.path == HEAD else group.inputs


def _with_ids(site: Site, ids: int) -> Site:
    """The site of a table with `ids` token ids; the site of a linear map is returned unchanged."""
    if site.group.place is not None or ids == _ids(site):
        return site
    group, change = site.group, {"sizes": (ids,)} if site.group.path == HEAD else {"inputs": ids}
    return dataclasses.replace(site, group=dataclasses.replace(group, **change))


def _resized(table: np.ndarray, group: Group) -> np.ndarray:
    """A copy of a table [in, out] cut or zero-padded to the number of ids of a group."""
    shape = group.inputs, group.sizes[0]
    cut = table[: shape[0], : shape[1]]
    return np.pad(cut, [(0, size - own) for size, own in zip(shape, cut.shape, strict=True)])


def _fitted(kind: str, array: np.ndarray, group: Group) -> np.ndarray:
    """A factor or change of a table with fewer ids, zero-padded to the ids of a group."""
    axis = 1 if group.path == HEAD else 0
    if kind == ("down" if axis else "up"):  # has no axis of ids
        return array
    more = (group.sizes[0] if axis else group.inputs) - array.shape[axis]
    return np.pad(array, [(0, more if number == axis else 0) for number in range(2)])


class _Reader:
    """Reads the tensors of one adapter."""

    def __init__(
        self, config: AdapterConfig, checkpoint: Checkpoint, model: Decoder, folder: Path
    ) -> None:
        self.config, self.checkpoint, self.model = config, checkpoint, model
        self.folder = folder
        self.sites = find_sites(model)
        self.arrays = {
            place.name.removesuffix(".weight"): place
            for place in model.array_places(model.config)
            if place.path.endswith("norm.weight")
        }

    @functools.cached_property
    def base(self) -> Decoder:
        """The base model for `base_matrix`."""
        return whole(self.model)

    def read(self) -> Adapter:
        """Reads all tensors of the adapter."""
        by_group: dict[str, dict[tuple[Site, str], Module]] = collections.defaultdict(dict)
        arrays = {}
        for name, kinds in self._modules().items():
            if (place := self.arrays.get(name)) is not None and set(kinds) == {"whole"}:
                [norm] = kinds.values()
                self._require(norm, place.shape)
                arrays[place.path] = self._array(norm) + np.float32(place.offset)
                continue
            site = self._site(name, kinds)
            info = kinds.get("copy", kinds.get("whole"))
            own = _with_ids(site, info.shape[0]) if info and info.shape else site
            if _ids(own) > _ids(site):
                assert info is not None
                arrays[site.group.path] = self._more_tokens(name, own, kinds, info)
                continue
            module = self._module(name, own, kinds)
            if own is not site:  # a table of fewer ids doesn't change the others
                module = {kind: _fitted(kind, array, site.group) for kind, array in module.items()}
            by_group[site.group.path][site, name] = module
            if "tokens" in kinds and self.model.config.tie_word_embeddings:
                head, tied = self._tied(name, kinds["tokens"])
                by_group[HEAD].setdefault((head, HEAD), tied)
        found = {path: self._change(modules) for path, modules in by_group.items()}
        changes = {path: change for path, change in found.items() if change is not None}
        if not changes and not arrays:
            raise CheckpointError("the file has no change of any module")
        tokenizer = None
        if {EMBEDDING, HEAD} & set(arrays) and os.path.lexists(self.folder / TOKENIZER_NAME):
            tokenizer = Tokenizer.from_folder(self.folder)
        return Adapter(changes, arrays, tokenizer)

    def _tied(self, name: str, info: TensorInfo) -> tuple[Site, Module]:
        """The head's site of a base with a tied table, and the change by single tokens' rows."""
        [head] = self.sites[name_of(self.model.names, HEAD).removesuffix(".weight")]
        return head, self._tokens(name, info, head.group)

    def _modules(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors of each module, by kind."""
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
        """The site of a module. A stack of experts has two maps; the shape decides between them."""
        sites = self.sites.get(name.removesuffix(".base_layer"), [])
        if len(sites) > 1 and "down" in kinds:
            width = kinds["down"].shape[-1:]
            sites = [site for site in sites if width == (site.group.inputs,)] or sites
            if len(sites) > 1:  # PEFT nests two wrappers: the inner one adapts the first map
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
        """The arrays of one adapted module, by kind.

        `down` [in, rank] and `up` [rank, out], with a leading axis of experts for a stack of
        experts; `magnitude` (DoRA); or `whole`, the change of a whole table.
        """
        found = Module()
        if (info := kinds.get("tokens")) is not None:
            if len(kinds) > 1:
                raise CheckpointError(
                    f"{info.name} is beside other changes of {name}: expected one"
                )
            return self._tokens(name, info, site.group)
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
        """The module's `down`, scaled `up`, and `magnitude` (DoRA) if it has one."""
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
            # In the rank axis, experts vary slowest in lora_A and fastest in lora_B.
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

    def _tokens(self, name: str, info: TensorInfo, group: Group) -> Module:
        """The change of single tokens' rows as low-rank factors, one of which selects the rows."""
        if group.place is not None:
            raise CheckpointError(f"{info.name} is of no table: expected the embedding or the head")
        is_head = group.path == HEAD
        ids, hidden = (group.inputs, group.sizes[0])[:: -1 if is_head else 1]
        tokens = self.config.tokens_of(name)
        self._require(info, (len(tokens), hidden))
        if max(tokens, default=0) >= ids:
            raise CheckpointError(f"trainable_token_indices has {max(tokens)}: the base has {ids}")
        base = base_matrix(self.base, group)
        rows = self._array(info) - (base.T if is_head else base)[tokens]
        chosen = np.zeros((ids, len(tokens)), np.float32)
        chosen[tokens, np.arange(len(tokens))] = 1
        return {"down": rows.T, "up": chosen.T} if is_head else {"down": chosen, "up": rows}

    def _table(self, info: TensorInfo, group: Group, *, is_copy: bool) -> np.ndarray | None:
        """The difference of a whole table to the base's, [in, out]; None for a mere copy."""
        if group.place is not None or group.experts is not None:
            raise CheckpointError(f"{info.name} is a whole linear map: expected LoRA of it")
        shape = group.inputs, group.sizes[0]
        self._require(info, shape[::-1] if group.path == HEAD else shape)
        base, found = base_matrix(self.base, group), self._array(info)
        change = (found.T if group.path == HEAD else found) - _resized(base, group)
        if not is_copy:
            return change
        known = change[: base.shape[0], : base.shape[1]]
        if np.linalg.norm(known) > NEARLY * np.linalg.norm(base):
            raise CheckpointError(f"{info.name} is not the base's own table: take its own base")
        known[...] = 0
        return change if change.size > base.size else None

    def _more_tokens(
        self, name: str, site: Site, kinds: Mapping[str, TensorInfo], info: TensorInfo
    ) -> np.ndarray:
        """A changed table [ids, hidden] that has more ids than the base's.

        site: with the table's number of ids. info: the tensor of the whole table.
        """
        table = _resized(base_matrix(self.base, site.group), site.group)
        change = self._table(info, site.group, is_copy="copy" in kinds)
        table += 0 if change is None else change
        factors = {kind: it for kind, it in kinds.items() if it is not info}
        if factors:
            module = self._module(name, site, factors)
            table += module["down"] @ module["up"]
        return table.T if site.group.path == HEAD else table

    def _change(self, modules: Mapping[tuple[Site, str], Module]) -> LowRank | None:
        """Joins the changes of the modules of a group of maps to one LowRank."""
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
        """DoRA's gain − 1 of each output channel; scales `ups` by the gain in place.

        The gain is magnitude / ‖weight + change‖ of an output channel.
        """
        if not any("magnitude" in module for module in modules.values()):
            return None
        base = base_matrix(self.base, group)
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
