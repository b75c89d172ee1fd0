"""Fused tensors of all experts in one: split when read, joined when written.

The first axis is that of experts, so one expert's part is a contiguous range of bytes in the file.
Of `…experts.gate_up_proj` or, with a suffix, `…experts.down_proj_blocks`, the part of expert 3 is
named `…experts.3.gate_up_proj.weight` or `…experts.3.down_proj.blocks`. Of a module's weight,
`…block_sparse_moe.input_linear.weight` (Granite), it is named
`…block_sparse_moe.experts.3.input_linear.weight`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.models import Decoder
from mpjax.models.parameters import ExpertPlace, LinearPlace

GATE_UP = "mlp.experts.gate_up"
_NAME = re.compile(r"(.+\.experts)\.([a-z]+(?:_up)?_proj)(?:_(blocks|scales|bias))?")
_NAME_OF_MODULE = re.compile(r"(.+)\.(input_linear|output_linear)\.(weight)")
_NAME_OF_ONE = re.compile(r"(.+\.experts)\.\d+\.([^.]+)\.([^.]+)")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}
# More experts than any layer has: limits the names that a damaged header can create.
MOST_EXPERTS = 4096


def split_experts(checkpoint: Checkpoint, decoder: type[Decoder]) -> Checkpoint:
    """The checkpoint with the decoder's names, and a tensor per expert instead of fused tensors.

    decoder: its names decide whether an expert's gate and up are one map or two. A checkpoint
    with its names and without fused tensors is returned unchanged.
    """
    if decoder.renamed:
        checkpoint = checkpoint.renamed(decoder.renamed)
    wanted = decoder.names.get(GATE_UP)
    if wanted is None:
        return checkpoint
    are_apart = not isinstance(wanted, str) and len(wanted) > 1
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        of_module = _NAME_OF_MODULE.fullmatch(name) if len(info.shape) == 3 else None
        match = of_module or _NAME.fullmatch(name)
        if match is None or len(info.shape) < 2 or not 0 < info.shape[0] <= MOST_EXPERTS:
            tensors[name] = info
            continue
        prefix, module, suffix = match.groups()
        prefix += ".experts" if of_module else ""
        for part in _rows(info, f"{prefix}.{{}}", info.shape[0]):
            halves = _HALVES.get(module, ()) if are_apart and part.shape[0] % 2 == 0 else ()
            for each in _split(part, module, suffix or "weight", halves):
                tensors[each.name] = each
    if len(tensors) == len(checkpoint.tensors):
        return checkpoint
    return dataclasses.replace(checkpoint, tensors=types.MappingProxyType(tensors))


def is_joint(place: LinearPlace) -> bool:
    """Whether files store the maps of all experts as one fused tensor."""
    if not isinstance(place, ExpertPlace):
        return False
    return place.is_transposed or bool(_NAME_OF_MODULE.fullmatch(f"{place.names[0]}.weight"))


def join_experts(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The inverse of `split_experts`: yields fused tensors with the files' names.

    tensors: names and tensors of single experts, in the order of experts.
    """
    parts: dict[str, list[Any]] = {}
    for name, array in tensors:
        parts.setdefault(name_of_all(name)[0], []).append(array)
    for name in list(parts):
        yield name, jnp.stack(parts.pop(name))


def name_of_all(name: str) -> tuple[str, int]:
    """The name of the fused tensor that contains an expert's tensor, and the index of its half.

    The index is 0 for a fused tensor without halves.
    """
    match = _NAME_OF_ONE.fullmatch(name)
    assert match is not None, f"{name} is no expert's"
    prefix, module, suffix = match.groups()
    for joint, halves in _HALVES.items():
        if module in halves:
            whole, half = joint, halves.index(module)
            return f"{prefix}.{whole}" + ("" if suffix == "weight" else f"_{suffix}"), half
    if _NAME_OF_MODULE.fullmatch(f"{prefix}.{module}.{suffix}"):
        return f"{prefix.removesuffix('.experts')}.{module}.{suffix}", 0
    return f"{prefix}.{module}" + ("" if suffix == "weight" else f"_{suffix}"), 0


def _split(
    info: TensorInfo, module: str, suffix: str, halves: tuple[str, ...]
) -> Iterator[TensorInfo]:
    """An expert's tensor with its name, or two halves (gate and up) with theirs."""
    if not halves:
        yield dataclasses.replace(info, name=f"{info.name}.{module}.{suffix}")
        return
    rows = info.shape[0] // 2
    size = info.nbytes // 2
    for number, name in enumerate(halves):
        begin = info.begin + number * size
        yield dataclasses.replace(
            info,
            name=f"{info.name}.{name}.{suffix}",
            shape=(rows, *info.shape[1:]),
            begin=begin,
            end=begin + size,
        )


def _rows(info: TensorInfo, name: str, count: int) -> Iterator[TensorInfo]:
    """One tensor for each index of the first axis."""
    shape = info.shape[1:]
    size = math.prod(shape) * info.dtype.itemsize
    for index in range(count):
        begin = info.begin + index * size
        yield dataclasses.replace(
            info, name=name.format(index), shape=shape, begin=begin, end=begin + size
        )
