"""Checkpoints on disk: reading files, and decoding the weights of quantised modules."""

from __future__ import annotations

from mpjax.checkpoint.awq import AWQConfig
from mpjax.checkpoint.fp8_config import FP8Config
from mpjax.checkpoint.gptq_config import GPTQConfig
from mpjax.checkpoint.linear import check_scales
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.errors import CheckpointError

__all__ = [
    "AWQConfig",
    "Checkpoint",
    "CheckpointError",
    "FP8Config",
    "GPTQConfig",
    "TensorInfo",
    "check_scales",
]
