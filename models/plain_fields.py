"""Fields of frozen dataclasses as values that JSON can hold and that are hashable."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def make_plain(config: Any) -> None:
    """Replaces NumPy scalars by Python numbers, which JSON can hold, and lists by tuples.

    config: a frozen dataclass, changed in place.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(config, field.name, value.item())
        elif isinstance(value, list):
            object.__setattr__(config, field.name, tuple(value))
