"""Settings of a training run; the defaults are those of the bundled model."""

from __future__ import annotations

import dataclasses
from typing import Any


class TrainingError(ValueError):
    """Training can't work with the given settings or data; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a training run, besides the data and the model's shape.

    learning_rate: the peak, after a linear warm-up; a half cosine decays it to a tenth.
    weight_decay: of matrices, decoupled and times the learning rate, as in AdamW. A model that
        sees its text many times needs far more than the usual 0.1 [Kim et al. 2025,
        "Pre-training under infinite compute"].
    noise: the share of input tokens that is replaced by random ones of the training text
        [Xie et al. 2017, "Data noising as smoothing in neural network language models"].
    batch: windows of text in a step. context: tokens in a window.
    interval: steps between measurements of the validation loss.
    compute_dtype: of the forward and backward pass; the weights are kept in float32.

    Raises TrainingError for a value out of range.
    """

    steps: int = 5200
    learning_rate: float = 3e-3
    weight_decay: float = 1.0
    noise: float = 0.1
    batch: int = 16
    context: int = 1024
    warmup: int = 200
    interval: int = 100
    compute_dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "interval"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "warmup", "seed"):
            if getattr(self, name) < 0:
                raise TrainingError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.noise <= 1:
            raise TrainingError(f"noise is a share from 0 to 1, got {self.noise}")
        if self.compute_dtype not in ("bfloat16", "float32"):
            raise TrainingError(
                f"compute_dtype must be bfloat16 or float32, got {self.compute_dtype!r}"
            )


def sweep(base: Recipe) -> list[Recipe]:
    """Five recipes, `base` first, which differ only in settings that need no recompilation."""
    shorter, decay = max(1, base.steps // 2), base.weight_decay
    variations: list[dict[str, Any]] = [
        {},
        {"weight_decay": 2 * decay},
        {"steps": shorter},
        {"steps": shorter, "noise": 0.0},
        {"steps": shorter, "noise": 0.0, "weight_decay": 0.3 * decay},
    ]
    return [dataclasses.replace(base, **variation) for variation in variations]
