"""Writes an adapter as a PEFT folder, which PEFT, transformers and vLLM load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpjax.adapters.collection import Adapter
from mpjax.adapters.sites import Site, base_matrix, find_sites, whole
from mpjax.checkpoint import array_file, shards
from mpjax.checkpoint.adapters.config import NAME
from mpjax.checkpoint.adapters.folder import WEIGHTS, parameter_of
from mpjax.checkpoint.staging import staged
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank
from mpjax.models.parameters import EMBEDDING, HEAD

INNER = "gate_up"
Arrays = dict[str, Any]  # of NumPy arrays


def save_adapter(
    lm: LanguageModel, folder: str | os.PathLike[str], name: str | None = None
) -> None:
    """Writes an adapter to a PEFT folder, in float32.

    name: of a loaded adapter. None: the adapter inside the model, made by `mpjax.lora` and possibly
        trained.

    A module of the base's files that is split into several maps here, such as Phi's `qkv_proj`, has
    the sum of their ranks.

    Raises ValueError for a folder that is not empty, for a model without an adapter inside, and for
    a DoRA adapter, whose magnitudes only its original folder has.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    folder = Path(os.path.realpath(Path(folder).expanduser()))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: choose another folder")
    adapter = Adapter.of(lm.model) if name is None else lm.adapters[name].adapter
    tensors, config = _contents(lm.model, adapter)
    config["base_model_name_or_path"] = str(lm.source)
    shard = shards.Shard(WEIGHTS, array_file.in_order(tensors))
    with staged(folder) as new:
        (new / NAME).write_text(json.dumps(config, indent=2), encoding="utf-8")
        with shards.writing(new, [shard]) as write:
            for key in shard.tensors:
                write(key, tensors[key], lambda count: None)


def _contents(model: Decoder, adapter: Adapter) -> tuple[Arrays, dict[str, Any]]:
    """The tensors of an adapter, and the keys of its adapter_config.json."""
    tensors: Arrays = {}
    ranks: dict[str, int] = {}
    targets: dict[str, list[str]] = {"modules": [], "parameters": [], "saved": []}
    for name, site, change in _modules(model, adapter):
        if change.gain is not None:
            raise ValueError(f"{name} has DoRA's magnitudes, which are not written")
        if not change.ups:
            tensors[f"base_model.model.{name}.weight"] = _whole(model, site, change)
            targets["saved"].append(name)
            continue
        first, second = _factors(site, change)
        if not first.any() and not second.any():
            continue  # a map of the group that the adapter doesn't change
        pattern = parameter_of(name, site)
        ranks[pattern] = first.shape[-1]
        targets["modules" if site.group.experts is None else "parameters"].append(pattern)
        tensors |= _named(name, site, first, second)
    most = max(ranks.values(), default=1)
    return tensors, {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True},
        **{"r": most, "lora_alpha": most, "rank_pattern": ranks, "alpha_pattern": ranks},
        "target_modules": targets["modules"],
        "target_parameters": targets["parameters"] or None,
        "modules_to_save": targets["saved"] or None,
    }


def _modules(model: Decoder, adapter: Adapter) -> Iterator[tuple[str, Site, LowRank]]:
    """The modules that an adapter changes, with names in the base's files; experts stacked."""
    for name, sites in find_sites(model).items():
        for site in sites:
            change, group = adapter.changes.get(site.group.path), site.group
            is_stack = group.experts is not None and site.expert is None
            is_own = group.experts is None and (group.place is None or name in group.place.names)
            if change is not None and (is_stack or is_own):
                # PEFT nests two wrappers around experts; the inner one wraps their first map.
                both = group.path.endswith(INNER) and _outer(group.path) in adapter.changes
                yield f"{name}.base_layer" if is_stack and both else name, site, change


def _outer(path: str) -> str:
    """The path of the experts' down projection, given that of gate and up."""
    return path.removesuffix(INNER) + "down"


def _whole(model: Decoder, site: Site, change: LowRank) -> np.ndarray:
    """The whole table [ids, hidden] after the change."""
    table = base_matrix(whole(model), site.group) + np.asarray(change.arrays[0], np.float32)
    return np.ascontiguousarray(table.T if site.group.path == HEAD else table)


def _factors(site: Site, change: LowRank) -> tuple[np.ndarray, np.ndarray]:
    """The joint low-rank factors of a module: [*experts, in, rank] and [*experts, rank, out]."""
    down, ups, _ = change.arrays
    apart = np.asarray(down, np.float32).reshape(*down.shape[:-1], len(ups), -1)
    numbers = range(site.first, site.first + site.count)
    first = np.concatenate([apart[..., number, :] for number in numbers], -1)
    second = np.zeros((*first.shape[:-2], first.shape[-1], site.outputs), np.float32)
    at = 0
    for index, number in enumerate(numbers):
        size = site.group.sizes[number]
        rows = slice(index * change.rank, (index + 1) * change.rank)
        second[..., rows, at : at + size] = ups[number]
        at += size
    if site.group.alternates and site.count > 1:
        gate, up = np.split(second, 2, -1)
        second = np.stack([gate, up], -1).reshape(second.shape)
    return first, second


def _named(name: str, site: Site, first: np.ndarray, second: np.ndarray) -> Arrays:
    """The tensors of a module, as PEFT names and orders them."""
    if site.group.experts is not None:
        # In the rank axis, experts vary slowest in lora_A and fastest in lora_B.
        first = np.moveaxis(first, 1, 2).reshape(-1, first.shape[1]).T
        second = np.moveaxis(second, 0, 1).reshape(-1, second.shape[-1])
    is_table = site.group.path == EMBEDDING
    kinds = ("embedding_A", "embedding_B") if is_table else ("A.weight", "B.weight")
    factors = zip(kinds, (first.T, second.T), strict=True)
    return {
        f"base_model.model.{name}.lora_{kind}": np.ascontiguousarray(factor)
        for kind, factor in factors
    }
