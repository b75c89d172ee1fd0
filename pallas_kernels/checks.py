"""Checks of arguments that operations share. The values of traced arrays are not checked."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LONGEST_SHOWN = 60
_REAL = (jnp.floating, jnp.integer, jnp.bool_)
# Common names of dtypes that NumPy does not know, or understands as another dtype.
_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """The choice that is most similar to a string, or None if none is similar."""
    return next(iter(difflib.get_close_matches(text, choices, n=1)), None)


def did_you_mean(choice: str | None) -> str:
    """The suggestion at the end of a message about an unknown name; empty for None."""
    return "" if choice is None else f" (did you mean {choice!r}?)"


def shown(value: Any) -> str:
    """A value as text for a message: short, and on one line."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype} of shape {value.shape}"
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def as_array(name: str, value: Any) -> jax.Array:
    """Returns a JAX array unchanged, and converts NumPy arrays, numbers and lists to one.

    Raises ValueError for a value that is not an array of real numbers, such as None, a string,
    complex numbers, and lists of unequal lengths.
    """
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError("this is no array, whatever JAX makes of it")
        array = value if isinstance(value, jax.Array) else _make_array(value)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in _REAL):
            raise TypeError(f"{array.dtype} is not of real numbers")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {shown(value)}: expected an array of real numbers") from error
    return array


def _make_array(value: Any) -> jax.Array:
    """`jnp.asarray(value)`, or inside a `jit` a NumPy array of the same dtype and values.

    There, JAX's array would be traced, and checks could not see its values.
    """
    array = jnp.asarray(value)
    if not is_known(value):
        return array
    found = np.asarray(value, array.dtype)
    if jnp.issubdtype(array.dtype, jnp.integer) and not np.array_equal(found, value):
        raise OverflowError(f"{array.dtype} does not hold all of these")
    return array if is_known(array) else found  # type: ignore[return-value]


def as_arrays(operation: str, **values: Any) -> tuple[jax.Array, ...]:
    """Converts several arguments of an operation as `as_array` does, in their order."""
    return tuple(as_array(f"{operation}: {name}", value) for name, value in values.items())


def optional_array(name: str, value: Any) -> jax.Array | None:
    """Returns None unchanged, and converts other values as `as_array` does."""
    return None if value is None else as_array(name, value)


def require_floats(operation: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays are of real floating-point dtypes."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{operation}: {name} has the dtype {array.dtype}: expected floating point"
            )


def require_type(name: str, value: Any, *kinds: type, hint: str = "") -> None:
    """Raises ValueError for a value that has none of the types `kinds`; `hint` ends its message."""
    if not isinstance(value, kinds):
        expected = " or ".join("a text" if kind is str else f"a {kind.__name__}" for kind in kinds)
        raise ValueError(f"{name} is {shown(value)}: expected {expected}{hint}")


def as_dtype(name: str, value: Any, *, kind: Any = jnp.floating) -> jnp.dtype:
    """Converts a dtype or its name to a dtype; names may be short (`bf16`) or PyTorch's.

    Raises ValueError for anything else, and for a dtype that is not a subtype of `kind`.
    """
    text = str(value).strip().lower().removeprefix("torch.")
    is_name = isinstance(value, str) or str(value).startswith("torch.")
    try:
        if value is None or isinstance(value, jax.Array | np.ndarray):
            raise TypeError("this is no dtype, whatever NumPy makes of it")
        dtype = jnp.dtype(_SHORT_NAMES.get(text, text) if is_name else value)
        if not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{dtype} is none of {kind}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {shown(value)}: expected a dtype, such as bfloat16, float16 or float32"
        ) from error
    return dtype


def is_known(values: Any) -> bool:
    """Whether no leaf of a tree is traced, so that all values are known."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def are_between(values: Any, smallest: float, largest: float) -> bool:
    """Whether all elements of `values` are from `smallest` to `largest`; True for traced values.

    Copies an array from the device. JAX caches the copy with the array, so that checks of the same
    array in each layer wait for the device only once.
    """
    if not is_known(values):
        return True
    found = np.asarray(values)
    return bool(((found >= smallest) & (found <= largest)).all())


def static_number(name: str, value: Any, read: Callable[[Any], Any], expected: str) -> Any:
    """Converts a number for which kernels are compiled to a Python number; None stays None.

    read: `float`, or `operator.index` for whole numbers. expected: the end of the error message.
    Raises ValueError for a number that is not positive and finite, and for a traced number.
    """
    if value is None:
        return None
    number = _python_number(name, value, read)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {shown(value)}: expected {expected}, or None")
    return number


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Converts a whole number that shapes depend on to a Python int.

    Raises ValueError for a value that is not a whole number, is below `least`, or is traced.
    """
    number = _python_number(name, value, operator.index)
    if not number >= least:
        raise ValueError(f"{name} is {shown(value)}: expected {least} or more, a whole number")
    return number


def norm_epsilon(name: str, value: Any) -> float:
    """Converts a norm's epsilon, which is added to the mean square, to a Python float.

    Raises ValueError for a value that is not a finite number, is below 0, or is traced.
    """
    number = _python_number(name, value, float)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {shown(value)}: expected a finite number, 0 or above")
    return number


def _python_number(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """Converts a value with `read`; NaN for values that it can't convert, strings and bools.

    Raises ValueError for a traced value.
    """
    if not is_known(value):
        raise ValueError(
            f"{name} is traced, and programs are compiled for its value: pass a Python number, or "
            "name it in the static_argnames of jit"
        )
    try:
        return math.nan if isinstance(value, str | bytes | bool) else read(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


@jax.jit
def are_finite(x: jax.Array) -> jax.Array:
    """Whether all elements of x are finite, as a bool array []; allocates no copy of x.

    The sum of x · 0 is NaN if any element is NaN or infinite. In float32, a maximum would miss NaN,
    which XLA ignores on a CPU. In float16 XLA's maximum keeps NaN, and there the sum would first
    write a float32 copy of x.
    """
    if x.dtype == jnp.float16:
        return jnp.isfinite(x.max()) & jnp.isfinite(x.min())
    return jnp.isfinite((x * 0).sum())
