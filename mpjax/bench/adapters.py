"""Random adapters for a model with random weights, and the time that they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpjax.adapters.sites import find_sites
from mpjax.bench import tables
from mpjax.bench.case_state import from_host
from mpjax.bench.random_model import normal
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank, attach

# The scale of the up factors, relative to one that keeps the size of a linear map's inputs.
SMALL = 0.1
COLUMNS: tables.Columns = {
    "batch": "{batch}",
    "context": "{prompt_tokens}",
    "adapters": "{adapters}",
    "rank": "{rank}",
    "step": "{decode_step_microseconds:.0f} µs",
    "speed of steps": "{of_step:.3f}",
    "first token": tables.scaled("{:.1f} ms", "time_to_first_token_seconds", 1e3),
    "speed of prompts": "{of_prompt:.3f}",
    "check": "{logprob_difference:.2f} nats",
}


def adapted(model: Decoder, places: int, rank: int) -> Decoder:
    """The model with `places` random adapters of rank `rank` for the linear maps of its layers.

    Maps that no adapter may change (`LinearMaps.is_plain`) are left out.
    """
    groups = {site.group.path: site.group for each in find_sites(model).values() for site in each}
    groups = {path: it for path, it in groups.items() if it.place and not it.place.is_plain}
    keys, changes = jax.random.split(jax.random.key(2), len(groups)), {}
    for key, (path, group) in zip(keys, groups.items(), strict=True):
        axes = (places,) if group.experts is None else (places, group.experts)
        first, *others = jax.random.split(key, 1 + len(group.sizes))
        shape = *axes, group.inputs, len(group.sizes) * rank
        down = normal(first, shape, group.inputs**-0.5, model.config.dtype)
        ups = [
            normal(other, (*axes, rank, size), SMALL * rank**-0.5, model.config.dtype)
            for other, size in zip(others, group.sizes, strict=True)
        ]
        changes[path] = LowRank(down, ups, is_stack=True)
    return attach(model, changes)


def places(batch: int, adapters: int) -> jax.Array:
    """The adapter index of each row, int32 [batch]: 1 to `adapters` in turn; 0 for no adapter."""
    rows = np.arange(batch) % adapters + 1 if adapters else np.zeros(batch)
    return from_host(rows.astype(np.int32))


def compared(row: Mapping[str, Any], plain: Mapping[str, Any], places: int) -> dict[str, Any]:
    """A row with its speed relative to the same case without adapters.

    places: the model's number of adapters; a step reads only those of the batch's rows.
    """
    used = min(row["adapters"], row["batch"]) / places
    own = (row["weights_bytes"] - plain["weights_bytes"]) * used
    return dict(row) | {
        "step_bytes": plain["step_bytes"] + own,
        "of_step": _speed("decode_step_microseconds", row, plain),
        "of_prompt": _speed("time_to_first_token_seconds", row, plain),
    }


def _speed(key: str, row: Mapping[str, Any], plain: Mapping[str, Any]) -> float | None:
    return None if row[key] is None else plain[key] / row[key]
