"""Functions of one matrix, applied to stacks of them: experts, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def over_leading_axes(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function of each matrix of a stack, whose arrays all have `count` axes in front."""
    for _ in range(count):
        function = jax.vmap(function)
    return function
