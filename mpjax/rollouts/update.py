"""New weights for a language model, from a trainer whose arrays are on the devices already."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.checks import require_type, shown
from mpjax.language_model import LanguageModel
from mpjax.models import ArrayPlace
from mpjax.models.parameters import find
from mpjax.rollouts.renewal import largest_values, renew_array, renew_parts
from mpjax.rollouts.sources import Sources, read_tree

SCALES = ("new", "keep")


def update(
    lm: LanguageModel, tree: Any, *, scales: str = "new", version: int | None = None
) -> LanguageModel:
    """Writes new weights over those of a model, in place; returns the same model.

        grads = ...; optimizer.update(trainer, grads)
        mpjax.update(lm, nnx.state(trainer))      # or {"model.norm.weight": ..., ...}

    tree: all weights or some: an nnx.State or a module of a model with the same layers, such as the
        16-bit model that the packed `lm` was made from; nested mappings like its state; or a
        mapping from the names of tensors in Hugging Face's files to arrays. Arrays have 16 or 32
        bits, also in NumPy, or are packed as in `lm`. Arrays that are divided among devices, or on
        other devices, are moved from device to device, one at a time.
    scales: how packed weights are rounded: `new` rounds to nearest as `load` does; `keep` keeps
        scales and zero points, so that fewer codes change if weights change little, and weights
        out of the old range are clamped.
    version: the new `lm.version`, an integer above the old one; by default the next.

    The old arrays are donated, so models that share them (of `mpjax.lora`, `with_adapter` and
    `mpjax.quantize`) must be made again. Shapes and formats stay the same, so that no program is
    recompiled. Engines of the model take the new weights with their next step;
    `Engine.update_weights` also decides what happens to running requests, and waits for the
    engine's thread.

    Weights are rounded without rescaling. If a method such as AWQ or `rotate` has moved scales
    between the parameters of `lm`, update all weights of the model.

    Raises ValueError, before anything is written, for unknown names, for wrong shapes and dtypes,
    for values that are NaN, infinite or beyond the range of the model's dtype, for a down
    projection with a Hadamard transform of its input, and for a model that is divided among
    devices.
    """
    version = check_update(lm, scales, version)
    sources = read_tree(lm.model, tree)
    _require_sound(lm, sources)
    for place, new, offset in sources.arrays:
        variable = find(lm.model, place.path) if isinstance(place, ArrayPlace) else place
        variable.set_value(renew_array(variable.get_value(), new, offset))
    for linear_place, pieces in sources.linears.values():
        parts = linear_place.parts(lm.model)
        arrays = [(it.kernel.get_value(), it.bias and it.bias.get_value()) for it in parts]
        pieces = _without(pieces, arrays)
        renewed = renew_parts(arrays, pieces, keep_scales=scales == "keep") if pieces else ()
        for part, (kernel, bias) in zip(parts, renewed, strict=bool(pieces)):
            part.kernel.set_value(kernel)
            if part.bias is not None:
                part.bias.set_value(bias)
    lm.updates.version = version
    return lm


def check_update(lm: LanguageModel, scales: str, version: int | None) -> int:
    """The version of the next weights. Raises the errors of `update`, except those of the tree."""
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    if not isinstance(scales, str) or scales not in SCALES:
        raise ValueError(f"scales is {shown(scales)}: expected {' or '.join(map(repr, SCALES))}")
    lm.require_one_device("updating")
    return lm.updates.next(version)


def _without(pieces: dict[Any, list[Any]], parts: list[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The pieces without those whose arrays the model already has."""
    own = {id(leaf) for leaf in jax.tree.leaves(parts)}
    return {
        piece: arrays
        for piece, arrays in pieces.items()
        if not any(id(array) in own for array in arrays)
    }


def _require_sound(lm: LanguageModel, sources: Sources) -> None:
    """Raises ValueError for values out of range, and for maps with a Hadamard transform."""
    for number, block in enumerate(lm.config.hadamard_blocks):
        if block is not None and (path := f"layers.{number}.mlp.down") in sources.linears:
            raise ValueError(
                f"{path} of the model is mixed by Hadamard's transform of {block} channels, and "
                "new weights are not: quantise the new weights with mpjax.quantize"
            )
    plain = [
        (name, value)
        for name, value in zip(sources.names, sources.values, strict=True)
        if not isinstance(value, QuantizedTensor)
    ]
    limit = float(jnp.finfo(lm.config.dtype).max)
    for (name, _), largest in zip(plain, largest_values([x for _, x in plain]), strict=True):
        if not largest <= limit:
            found = f"the magnitude {largest:.3g}" if np.isfinite(largest) else "NaN or infinity"
            raise ValueError(
                f"the tree of weights has {found} in {name}: expected finite numbers within the "
                f"range of {lm.config.dtype}; the model keeps its weights"
            )
