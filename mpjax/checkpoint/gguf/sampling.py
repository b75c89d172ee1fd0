"""Reads the sampling settings of a GGUF file: its keys `general.sampling.*`.

Source: llama.cpp, gguf-py/gguf/constants.py and common/common.cpp.
"""

from __future__ import annotations

from typing import Any

from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.sampling import generation_config
from mpjax.sampling.settings import Sampling

PREFIX = "general.sampling."
NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # other names are equal
# Key → settings that are unused if the key is 0.
OFF: dict[str, tuple[str, ...]] = {
    "xtc_probability": ("xtc_probability", "xtc_threshold"),
    "mirostat": ("mirostat", "mirostat_tau", "mirostat_eta"),
}


def read_sampling(metadata: Metadata) -> Sampling | None:
    """The Sampling of a file; None without such keys.

    Warns of unsupported keys that affect sampling, such as `penalty_last_n`: penalties here count
    all tokens. Raises CheckpointError for values out of range.
    """
    found: dict[str, Any] = {
        key.removeprefix(PREFIX): value
        for key, value in metadata.values.items()
        if key.startswith(PREFIX)
    }
    for switch, names in OFF.items():
        if not found.get(switch):
            found = {key: value for key, value in found.items() if key not in names}
    if found.get("penalty_repeat", 1) == 1:
        found.pop("penalty_last_n", None)
    for key in ("temp", "top_p", "min_p", "penalty_repeat"):
        if key in found:
            found[key] = metadata.number(PREFIX + key)
    if "top_k" in found:
        found["top_k"] = max(metadata.whole(f"{PREFIX}top_k"), 0)
    if "temp" in found:
        found["temp"] = max(found["temp"], 0.0)  # below 0, llama.cpp is greedy
    keys = {NAMES.get(key, key): value for key, value in found.items()}
    return generation_config.read_sampling(keys, f"{metadata.path}: {PREFIX}*")
