"""Checks a DecoderConfig that came from a file: types, ranges, and what fits together."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from mpjax.models.config import MAXIMUM_INTEGER, ConfigError, DecoderConfig, RopeScaling

DTYPES = ("bfloat16", "float16", "float32")
ROPE_KINDS = ("linear", "llama3")


def require_sound(config: DecoderConfig) -> None:
    """Raises ConfigError, naming the field, for a value that no decoder can have."""
    _check_fields(config)
    for window in config.windows:
        if window is not None:
            _check_number("a window of windows", window, int)
    if not config.windows:
        raise ConfigError("windows is empty: expected one for each layer")
    if not all(type(i) is int and 0 <= i < config.vocab_size for i in config.stop_ids):
        raise ConfigError(
            f"stop_ids is {list(config.stop_ids)!r:.80}: expected token ids from 0 to "
            f"{config.vocab_size - 1}"
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ConfigError(
            f"there are {config.num_heads} heads of {config.head_dim} channels for "
            f"{config.num_kv_heads} KV heads: expected a multiple of the KV heads, and an even "
            "number of channels"
        )
    _check_choice("dtype", config.dtype, DTYPES)
    scaling = config.rope_scaling
    if scaling is None:
        return
    if not isinstance(scaling, RopeScaling):
        raise ConfigError(f"rope_scaling is {scaling!r:.80}: expected a RopeScaling, or None")
    _check_fields(scaling)
    _check_choice("kind of rope_scaling", scaling.kind, ROPE_KINDS)
    if not scaling.high_frequency_factor > scaling.low_frequency_factor:
        raise ConfigError(
            f"high_frequency_factor is {scaling.high_frequency_factor}: expected more than "
            f"low_frequency_factor, {scaling.low_frequency_factor}"
        )


def _check_fields(config: DecoderConfig | RopeScaling) -> None:
    """The numbers and switches of a dataclass; all numbers are positive."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == "bool" and type(value) is not bool:
            raise ConfigError(f"{field.name} is {value!r:.80}: expected true or false")
        if field.type in ("int", "float"):
            _check_number(field.name, value, int if field.type == "int" else float)


def _check_number(name: str, value: Any, kind: type) -> None:
    kinds = (int,) if kind is int else (int, float)
    maximum = MAXIMUM_INTEGER if kind is int else sys.float_info.max
    if type(value) not in kinds or not 0 < value <= maximum:
        expected = f"an integer from 1 to {maximum}" if kind is int else "a positive number"
        raise ConfigError(f"{name} is {value!r:.80}: expected {expected}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r:.80}: expected {' or '.join(choices)}")
