"""Applies functions of one matrix to stacks of matrices: experts, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def over_leading_axes(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Maps a function of one matrix over a stack, whose arrays all have `count` leading axes."""
    for _ in range(count):
        function = jax.vmap(function)
    return function
