"""Chooses the implementation of an operation, and warns callers about a slow one."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax.kernels import device
from mpjax.kernels.checks import shown

# Folders of this package and of JAX: a warning is attributed to the first caller outside of them.
_INSIDE = tuple(os.path.dirname(file) + os.sep for file in (__file__, str(jax.__file__)))


def choose(
    operation: str,
    wanted: str | None,
    default: str,
    choices: Sequence[str],
    why_not: Callable[[str], str | None],
) -> Any:
    """The name of the implementation of an operation to run.

    wanted: the caller's choice, one of `choices`. None means the default; if that can't run, the
        reference runs instead, with a warning on a GPU.
    why_not: returns the reason why an implementation can't run, or None if it can. The reference
        always can.

    Raises ValueError for a name that is not among the choices, and UnsupportedError, with the
    reason, if the caller's choice can't run.
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
    """Warns, on a GPU, that an operation runs as plain JAX there, and why."""
    if device.on_gpu():
        warn(f"{operation} runs as plain JAX on this GPU, which is slow: {reason}")


def warn(message: str) -> None:
    """Warns with the line that called this package, even through JAX's transformations."""
    frame, level = sys._getframe(), 1
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
