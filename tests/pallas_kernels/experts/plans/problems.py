"""Problems of published mixtures, on an H200."""

from __future__ import annotations

from typing import Any

from mpjax.kernels import ProductFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.experts.plans import Problem

LIMITS = Limits(132, 9.0, "NVIDIA H200")


def qwen3(tokens: int, text: str = "uint4:g128", **changes: Any) -> Problem:
    """gate_up of Qwen3-30B-A3B."""
    fields = {
        "per_token": 8,
        "experts": 128,
        "format": ProductFormat.of(text),
        "channels": 2048,
        "outputs": 1536,
        "gated": True,
        "limits": LIMITS,
    }
    return Problem(tokens, **fields | changes)
