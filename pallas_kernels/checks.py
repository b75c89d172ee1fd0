"""Checks of arguments that operations share; of values that are traced, as under `jit`, none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_known(values: Any) -> bool:
    """Whether no leaf of a tree is traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def are_between(values: Any, smallest: int, largest: int) -> bool:
    """Whether all numbers are; True where tracing hides them.

    Reads an array back from the device, once: it keeps what was read, so that calls for all layers
    wait together no longer than one.
    """
    if not is_known(values):
        return True
    found = np.asarray(values)
    return bool(((found >= smallest) & (found <= largest)).all())


def static_number(name: str, value: Any, read: Callable[[Any], Any], expected: str) -> Any:
    """A positive, finite number that kernels are compiled for, as Python's; None for None.

    read: `float`, or `operator.index` for whole numbers. Raises ValueError for another number, and
    for a traced one.
    """
    if value is None:
        return None
    if not is_known(value):
        raise ValueError(
            f"{name} is traced, and kernels are compiled for its value: pass a Python number, or "
            "name it in the static_argnames of jit"
        )
    try:
        number = math.nan if isinstance(value, str | bool) else read(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value}: expected {expected}, or None")
    return number


@jax.jit
def are_finite(x: jax.Array) -> jax.Array:
    """Whether no number of x is NaN or infinite; takes no memory beside x.

    Zero times any of these is NaN. In float32 a maximum would not do: on a CPU, XLA's passes over
    NaN. In float16 it does not, and a sum would first write all of x out in float32.
    """
    if x.dtype == jnp.float16:
        return jnp.isfinite(x.max()) & jnp.isfinite(x.min())
    return jnp.isfinite((x * 0).sum())
