"""Reads checkpoints, decodes the weights of quantised modules, and saves converted models."""

from __future__ import annotations

from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.registry import SCHEMES
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.errors import CheckpointError

__all__ = [
    "SCHEMES",
    "Checkpoint",
    "CheckpointError",
    "Policy",
    "Reader",
    "Scheme",
    "TensorInfo",
]
