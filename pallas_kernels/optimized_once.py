"""Functions that XLA optimises once for all of their calls, on a CPU.

On a CPU, compiling a model takes longer than many of its steps, mostly because equal layers are
compiled repeatedly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mpjax.kernels import device


def optimized_once(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: under `jit` on a CPU, the function is called instead of inlined.

    XLA's passes then process one function for all calls with arguments of the same shapes. A call
    copies arguments that it returns changed, so a cache should not be an argument. Arguments are
    pytrees of arrays, or `static`. On a GPU, and with JAX before 0.12, the function is inlined, and
    under `shard_map`, too: XLA refuses the index of a device in a function that is called.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if not hasattr(jax, "Inline"):
            return function
        called = jax.jit(function, inline=jax.Inline.XLA_LATE, static_argnames=static)

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            inlines = device.on_gpu() or jax.sharding.get_abstract_mesh().manual_axes
            return (function if inlines else called)(*arguments, **named)

        return run

    return decorate
