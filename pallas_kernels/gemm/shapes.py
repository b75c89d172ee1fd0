"""Named weight shapes of real models, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """The shape of a weight: `channels` is K, the input channels; `outputs` is N."""

    name: str
    channels: int
    outputs: int


QWEN3_8B = (
    GemmShape("qwen3-8b.qkv", 4096, 6144),
    GemmShape("qwen3-8b.output", 4096, 4096),
    GemmShape("qwen3-8b.gate_up", 4096, 24576),
    GemmShape("qwen3-8b.down", 12288, 4096),
)

LLAMA3_70B = (
    GemmShape("llama3-70b.qkv", 8192, 10240),
    GemmShape("llama3-70b.output", 8192, 8192),
    GemmShape("llama3-70b.gate_up", 8192, 57344),
    GemmShape("llama3-70b.down", 28672, 8192),
)

# Shapes by the name of their model.
MODELS = {"qwen3-8b": QWEN3_8B, "llama3-70b": LLAMA3_70B}

# Small enough for interpret mode; no tile divides the second's K and N.
SMALL = (
    GemmShape("small.even", 512, 128),
    GemmShape("small.ragged", 384, 200),
)


def named(names: Iterable[str]) -> tuple[GemmShape, ...]:
    """The shapes of names, without repetition: a model's (`qwen3-8b`) or one (`qwen3-8b.qkv`).

    Raises ValueError, which lists the known names, for an unknown name.
    """
    known = {shape.name: (shape,) for model in MODELS.values() for shape in model} | MODELS
    found: dict[GemmShape, None] = {}
    for name in names:
        if name not in known:
            raise ValueError(
                f"unknown shape {name!r}: expected a model ({', '.join(MODELS)}) or one of its "
                f"matrices, such as {next(iter(known))}"
            )
        found.update(dict.fromkeys(known[name]))
    return tuple(found)
