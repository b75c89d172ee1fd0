"""Reads checkpoints, decodes the weights of quantised modules, and saves converted models."""

from __future__ import annotations

from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.checkpoint.schemes.registry import SCHEMES
from mpjax.errors import CheckpointError

__all__ = [
    "SCHEMES",
    "AWQScheme",
    "Checkpoint",
    "CheckpointError",
    "FP8Scheme",
    "GPTQScheme",
    "Scheme",
    "TensorInfo",
]
