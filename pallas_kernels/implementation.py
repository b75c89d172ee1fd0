"""Which implementation of an operation runs, and a word to the caller where it is a slow one."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax.kernels import device
from mpjax.kernels.checks import shown

# Whose files no caller wrote who could do something about a warning.
_INSIDE = tuple(os.path.dirname(file) + os.sep for file in (__file__, str(jax.__file__)))


def choose(
    operation: str,
    wanted: str | None,
    default: str,
    choices: Sequence[str],
    why_not: Callable[[str], str | None],
) -> Any:
    """The name of the implementation that runs.

    wanted: by the caller, one of `choices`, or None for the default or, where that can't run, the
        reference, of which a warning says so on a GPU.
    why_not: the reason why one can't run, or None if it can. The reference always can.

    Raises ValueError for a name that is no choice, and UnsupportedError, with the reason, where
    what is wanted can't run.
    """
    name = default if wanted is None else wanted
    if not isinstance(name, str) or name not in choices:
        raise ValueError(
            f"{operation}: unknown implementation {shown(name)}: expected "
            f"{', '.join(choices[:-1])} or {choices[-1]}"
        )
    reason = None if name == "reference" else why_not(name)
    if reason is None:
        return name
    if wanted is not None:
        raise device.UnsupportedError(f"{operation}: {name!r} can't run: {reason}")
    warn_of_reference(operation, reason)
    return "reference"


def warn_of_reference(operation: str, reason: str) -> None:
    """Says, on a GPU, that an operation runs as plain JAX there, and why."""
    if device.on_gpu():
        warn(f"{operation} runs as plain JAX on this GPU, which is slow: {reason}")


def warn(message: str) -> None:
    """Warns about the line that called this package, be it under transformations of JAX."""
    frame, level = sys._getframe(), 1
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
