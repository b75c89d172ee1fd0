"""Whether kernels of warpgroups may read weights before the kernels before them have ended.

A kernel whose plan has blocks `ahead` (`WarpgroupConfig`) copies weights while the kernel before it
still runs. That is wrong where that kernel writes the weights: inside of a `jit` that also
quantises them, or slices them out of a stack. Only the one who traces a program knows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

FIRST_VERSION = (0, 11, 2)  # of JAX; 0.10 has the instruction, but launches no kernel early

_are_in_place = contextvars.ContextVar("weights are in place", default=False)


@contextlib.contextmanager
def weights_in_place() -> Iterator[None]:
    """Says, while the context is open, that no kernel of the traced program writes a weight.

    So it is for weights that are arguments of the program, and are not donated.
    """
    token = _are_in_place.set(True)
    try:
        yield
    finally:
        _are_in_place.reset(token)


def may_copy_weights() -> bool:
    """Whether kernels of the program that is being traced may copy weights early."""
    return _are_in_place.get() and why_not() is None


def why_not(version: tuple[int, ...] = jax.__version_info__) -> str | None:
    """The reason why no kernel of warpgroups is launched early, or None if one can be.

    version: of JAX.
    """
    return (
        None
        if version >= FIRST_VERSION
        else "JAX launches kernels of Mosaic GPU early since 0.11.2"
    )
