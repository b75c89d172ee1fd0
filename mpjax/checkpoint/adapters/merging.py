"""Merges an adapter into its base's weights, which are rounded again to their formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.adapters.collection import Adapter
from mpjax.adapters.sites import base_matrix, find_sites
from mpjax.kernels import QuantizedTensor, quantize
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models import Linear
from mpjax.models.low_rank import LowRank
from mpjax.models.parameters import EMBEDDING, HEAD, TABLES


def merge(lm: LanguageModel, adapter: str | Adapter) -> LanguageModel:
    """The model with an adapter merged into its weights, and no adapters loaded.

    adapter: the name of a loaded adapter, or the result of `mpjax.read_adapter`.

    Changed weights are rounded to nearest in their formats. Other arrays are shared with `lm`,
    which doesn't change.

    Raises ValueError for an unknown name; for weights with act-order, mixed activation widths or
    static activation scales, which were calibrated for the unmerged weights; for an adapter of only
    one table if embedding and head are tied; and for a model divided among devices.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    lm.require_one_device("merging an adapter into")
    name = repr(adapter) if isinstance(adapter, str) else "that is given"
    adapter = adapter if isinstance(adapter, Adapter) else lm.adapters[adapter].adapter
    model = jax.tree.map(lambda array: array, lm.model)  # a copy with its own modules
    groups = {site.group.path: site.group for each in find_sites(model).values() for site in each}
    for path, change in adapter.changes.items():
        if (place := groups[path].place) is not None:
            parts, starts = place.parts(model), 0
            made = []
            for part in parts:
                kernel: Any = part.kernel.get_value()
                columns = slice(starts, starts := starts + kernel.shape[-1])
                made.append(_merged(part, change, columns, f"{path} of the adapter {name}"))
            place.assign(model, made)
            continue
        if model.config.tie_word_embeddings:
            raise ValueError(f"the adapter {name} changes the {path} alone, which is both tables")
        whole = base_matrix(model, groups[path]) + _product(change)
        _put_table(model, path, whole if path == EMBEDDING else whole.T)
    _put_more_tokens(model, adapter.arrays)
    for place in model.array_places(model.config):
        if place.path not in TABLES and (array := adapter.arrays.get(place.path)) is not None:
            dtype = place.read(model).dtype
            place.assign(model, jnp.asarray(array, dtype))
    return lm.with_model(model, tokenizer=adapter.tokenizer or lm.tokenizer)


def _product(change: LowRank) -> np.ndarray:
    """The change of a matrix, float32 [*experts, in, out]."""
    down, ups, _ = change.arrays
    if not ups:
        return np.asarray(down, np.float32)
    halves = np.split(np.asarray(down, np.float32), len(ups), -1)
    return np.concatenate([half @ up for half, up in zip(halves, ups, strict=True)], -1)


def _merged(part: Linear, change: LowRank, columns: slice, what: str) -> Linear:
    """The linear map plus its columns of the change, rounded to the map's format."""
    kernel: Any = part.kernel.get_value()
    own, gain = jnp.asarray(_product(change)[..., columns]), change.arrays[2]
    if not isinstance(kernel, QuantizedTensor):
        wide = kernel.astype(jnp.float32)
    else:
        wide = kernel.dequantize(jnp.float32)
        for field in ("permutation", "activation_bits", "activation_scale"):
            if getattr(kernel, field) is not None:
                raise ValueError(
                    f"{what}: the weight has a {field}, which was found for it as it is: merge the "
                    "adapter into the 16-bit model, and quantise that"
                )
    if gain is not None:
        wide = wide * (1 + jnp.asarray(gain[columns])[None])
    new: Any = wide + own
    if isinstance(kernel, QuantizedTensor):
        new = quantize(new.astype(kernel.scale_dtype), kernel.format, table=kernel.table)
    else:
        new = new.astype(kernel.dtype)
    return Linear(new, None if part.bias is None else part.bias.get_value())


def _put_more_tokens(model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces the model's tables by larger ones [ids, hidden], and sets its vocabulary size.

    Raises ValueError unless both tables are given, with the same number of ids.
    """
    found = {path: arrays[path] for path in TABLES if path in arrays}
    if not found:
        return
    if len({len(table) for table in found.values()}) > 1 or len(found) < len(TABLES):
        raise ValueError("the adapter has more tokens than the base in one of both tables alone")
    tied = model.config.tie_word_embeddings
    if tied and not np.array_equal(found[EMBEDDING], found[HEAD]):
        raise ValueError(
            "the adapter's embedding and head are not the same, and the base's are one table"
        )
    for path in model.config.tables:
        _put_table(model, path, found[path])
    model.config = dataclasses.replace(model.config, vocab_size=len(found[HEAD]))


def _put_table(model: Any, path: str, table: np.ndarray) -> None:
    """Replaces a table of the model by `table` [ids, hidden], packed if the old one is."""
    before = getattr(model, path)
    if not isinstance(before, Linear):
        before.set_value(jnp.asarray(table, before.get_value().dtype))
        return
    kernel: Any = before.kernel.get_value()
    packed = quantize(jnp.asarray(table.T, kernel.scale_dtype), kernel.format)
    setattr(model, path, Linear(packed))
