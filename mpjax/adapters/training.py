"""LoRA training: trainable pairs of matrices beside packed base weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.adapters.sites import Group, find_sites, require_runnable
from mpjax.kernels.checks import shown, whole_number
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank, attach

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel

ALL = "all-linear"


def lora(
    lm: LanguageModel,
    rank: int = 16,
    targets: str | Sequence[str] = ALL,
    *,
    seed: int = 0,
) -> LanguageModel:
    """Adds trainable LoRA pairs to a model; initially they don't change its outputs.

    The pairs are float32 `nnx.LoRAParam`s in `.model`, which shares the base's arrays:

        tuned = mpjax.lora(lm, 8, ["q_proj", "v_proj"])
        structure, pairs, frozen = nnx.split(tuned.model, nnx.LoRAParam, ...)

    After an update (`nnx.update(tuned.model, pairs)`), `mpjax.save_adapter(tuned, folder)` writes
    them, and `lm.add_adapter(name, mpjax.Adapter.of(tuned.model))` serves them.

    rank: of each map's pair. targets: suffixes of module names, like PEFT's target_modules; by
        default all maps of layers except experts. seed: of the random first matrices; the second
        are zeros.

    Raises ValueError for a rank below 1, for targets that match kv_b_proj or no map, and for a
    model that is divided among devices or already has an adapter inside.
    """
    if not isinstance(getattr(lm, "model", None), Decoder):
        raise ValueError(f"lm is {shown(lm)}: expected a LanguageModel, as mpjax.load gives it")
    lm.require_one_device("training adapters of")
    lm.require_no_head("training adapters of")
    if any(isinstance(module, LowRank) for _, module in nnx.iter_modules(lm.model)):
        raise ValueError("the model has an adapter itself: take the base")
    rank, chosen = whole_number("rank", rank), _chosen(lm, targets)
    keys = jax.random.split(jax.random.key(seed), len(chosen))
    changes = {
        group.path: _pairs(group, maps, rank, key)
        for (group, maps), key in zip(chosen, keys, strict=True)
    }
    return lm.with_model(attach(lm.model, changes))


def _chosen(lm: LanguageModel, targets: str | Sequence[str]) -> list[tuple[Group, set[int]]]:
    """The groups with target maps, and the indices of these maps."""
    is_all = isinstance(targets, str) and targets == ALL
    if not is_all and (
        isinstance(targets, str)
        or not targets
        or not all(isinstance(target, str) for target in targets)
    ):
        raise ValueError(f"targets is {shown(targets)}: expected {ALL!r}, or a list of names")
    found: dict[str, tuple[Group, set[int]]] = {}
    missing = set() if is_all else set(targets)
    for name, sites in find_sites(lm.model).items():
        hits = {target for target in missing | set(targets) if f".{name}".endswith(f".{target}")}
        missing -= hits
        for site in sites:
            place = site.group.place
            of_layer = place is not None and site.group.experts is None and not place.is_plain
            if of_layer if is_all else hits:
                _, maps = found.setdefault(site.group.path, (site.group, set()))
                maps.update(range(site.first, site.first + site.count))
    if missing:
        raise ValueError(f"no linear map of the model is called {', '.join(sorted(missing))}")
    require_runnable(lm.model, "targets has", found, "leave this map out")
    return list(found.values())


def _pairs(group: Group, maps: set[int], rank: int, key: jax.Array) -> LowRank:
    """The pairs of a group; maps that are not targets get untrainable zeros."""
    axes = () if group.experts is None else (group.experts,)
    shape = *axes, group.inputs, len(group.sizes), rank
    is_target = jnp.array([number in maps for number in range(len(group.sizes))])[:, None]
    bound = group.inputs**-0.5
    first = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    first = jnp.where(jax.lax.broadcast_to_rank(is_target, first.ndim), first, 0)
    ups = [jnp.zeros((*axes, rank, size)) for size in group.sizes]
    pairs = LowRank(first.reshape(*shape[:-2], -1), ups)
    for number, up in enumerate(ups):
        if number not in maps:
            pairs.ups[number] = nnx.Variable(up)
    return pairs
