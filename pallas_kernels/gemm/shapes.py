"""Named GEMM shapes of real models: the same for tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """A weight matrix of a model: K input channels, N output channels."""

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

# Small enough for interpret mode; N and K that no tile divides.
SMALL = (
    GemmShape("small.even", 512, 128),
    GemmShape("small.ragged", 384, 200),
)
