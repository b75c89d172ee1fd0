"""Reads an adapter's adapter_config.json, with PEFT's or MLX's keys."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpjax.errors import CheckpointError
from mpjax.kernels import files

NAME = "adapter_config.json"
OBEYED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora"),
    *("init_lora_weights", "bias", "trainable_token_indices"),
}
# The changed modules follow from the tensors' names and shapes. fan_in_fan_out concerns only
# Conv1D, which no model here has. The other keys are about training, or descriptive.
IRRELEVANT = {
    *("target_modules", "target_parameters", "modules_to_save", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout", "inference_mode"),
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version"),
    *("megatron_config", "megatron_core", "runtime_config", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "qalora_group_size", "velora_config"),
}
# Initialisations that change the base model's weights.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
SCALE = "lora_parameters"  # a key that only MLX's files have


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The ranks and scales of an adapter's modules.

    rank, alpha: of modules without a matching pattern. A module's scale is alpha / rank, or with
        `root` (rsLoRA) alpha / √rank.
    ranks, alphas: by patterns that match the end of a module's name.
    is_mlx: whether tensors have MLX's names, and are stored as [in, out].
    dora: whether each module has a magnitude vector. tokens: the ids whose rows in a table are
        trained, by the end of the table's name; "" for the embedding.
    """

    rank: int
    alpha: float
    root: bool = False
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_mlx: bool = False
    dora: bool = False
    tokens: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    def tokens_of(self, module: str) -> list[int]:
        """The ids whose rows of a table are trained (trainable_token_indices), by table name."""
        found = (tokens for end, tokens in self.tokens.items() if f".{module}".endswith(f".{end}"))
        return list(next(found, self.tokens.get("", ())))

    def rank_of(self, module: str) -> int:
        """The rank of a module. module: its name."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The scale of a module's low-rank product. module: its name."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return float(alpha / math.sqrt(rank) if self.root else alpha / rank)

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Reads a folder's adapter_config.json.

        Raises CheckpointError for an unreadable file, and names an unsupported key or value.
        """
        path = folder / NAME
        keys = files.read_object(path, CheckpointError)
        try:
            return _of_mlx(keys) if SCALE in keys else _of_peft(keys)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _of_peft(keys: Mapping[str, Any]) -> AdapterConfig:
    kind = keys.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"peft_type is {kind!r:.80}: expected LORA, the only supported kind")
    for name, value in keys.items():
        # Features that PEFT doesn't use have null, false or empty values.
        if name not in OBEYED | IRRELEVANT and value not in (None, False, [], {}):
            raise CheckpointError(f"{name} is {value!r:.80}: it is not supported")
    initial = keys.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.startswith(CHANGES_BASE):
        raise CheckpointError(
            f"init_lora_weights is {initial!r:.80}, which changes the base's weights: save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    if (bias := keys.get("bias", "none")) != "none":
        raise CheckpointError(
            f"bias is {bias!r:.80}: expected 'none', since adapters here have no biases"
        )
    return AdapterConfig(
        _rank("r", keys.get("r")),
        _number("lora_alpha", keys.get("lora_alpha", 8)),
        _flag("use_rslora", keys.get("use_rslora", False)),
        _patterns("rank_pattern", keys.get("rank_pattern"), _rank),
        _patterns("alpha_pattern", keys.get("alpha_pattern"), _number),
        dora=_flag("use_dora", keys.get("use_dora", False)),
        tokens=_tokens(keys.get("trainable_token_indices")),
    )


def _of_mlx(keys: Mapping[str, Any]) -> AdapterConfig:
    """MLX's configuration; keys except `lora_parameters` and `fine_tune_type` concern training."""
    if (kind := keys.get("fine_tune_type", "lora")) not in ("lora", "dora"):
        raise CheckpointError(f"fine_tune_type is {kind!r:.80}: expected lora or dora")
    found = keys[SCALE]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{SCALE} is {found!r:.80}: expected an object")
    rank = _rank(f"{SCALE}.rank", found.get("rank"))
    scale = _number(f"{SCALE}.scale", found.get("scale"))
    return AdapterConfig(rank, scale * rank, is_mlx=True, dora=kind == "dora")


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(_ending(pattern), module):
            return value
    return usual


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise CheckpointError(f"{name} is {value!r:.80}: expected a rank, a whole number above 0")
    return value


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise CheckpointError(f"{name} is {value!r:.80}: expected a number")
    return number


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{name} is {value!r:.80}: expected true or false")
    return bool(value)


def _tokens(value: Any) -> dict[str, list[int]]:
    name = "trainable_token_indices"
    if value is None:
        return {}
    found = value if isinstance(value, Mapping) else {"": value}
    for tokens in found.values():
        are_numbers = isinstance(tokens, list) and all(type(it) is int and it >= 0 for it in tokens)
        if not are_numbers or len(set(tokens)) < len(tokens):
            raise CheckpointError(f"{name} is {value!r:.80}: expected different token ids")
    return dict(found)


def _patterns(name: str, value: Any, read: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is {value!r:.80}: expected an object of patterns")
    for pattern in value:
        try:
            re.compile(_ending(pattern))
        except re.error as error:
            raise CheckpointError(f"{name} has {pattern!r:.80}, no pattern: {error}") from error
    return {pattern: read(f"{name}[{pattern!r}]", one) for pattern, one in value.items()}
