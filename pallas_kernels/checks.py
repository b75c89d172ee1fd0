"""Checks of arguments that operations share; of values that are traced, as under `jit`, none."""

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
# What people call dtypes whose names NumPy reads otherwise, or not at all.
_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """The choice that is most like a text, or None where none is much like it."""
    return next(iter(difflib.get_close_matches(text, choices, n=1)), None)


def did_you_mean(choice: str | None) -> str:
    """What stands in a message behind something unknown; nothing where no choice is like it."""
    return "" if choice is None else f" (did you mean {choice!r}?)"


def shown(value: Any) -> str:
    """A value as messages show it: short, and on one line."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype} of shape {value.shape}"
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def as_array(name: str, value: Any) -> jax.Array:
    """A JAX array as it is, or what `jnp.asarray` makes of NumPy's arrays, numbers and lists.

    Raises ValueError for what holds no real numbers, such as None, a text, complex numbers, and
    lists of unequal lengths.
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
    """`jnp.asarray`; in its place, inside of a `jit`, NumPy's array of the same dtype.

    What JAX makes there is traced, and its values are not known.
    """
    array = jnp.asarray(value)
    if not is_known(value):
        return array
    found = np.asarray(value, array.dtype)
    if jnp.issubdtype(array.dtype, jnp.integer) and not np.array_equal(found, value):
        raise OverflowError(f"{array.dtype} does not hold all of these")
    return array if is_known(array) else found  # type: ignore[return-value]


def as_arrays(operation: str, **values: Any) -> tuple[jax.Array, ...]:
    """`as_array` of several arguments of an operation, in their order."""
    return tuple(as_array(f"{operation}: {name}", value) for name, value in values.items())


def optional_array(name: str, value: Any) -> jax.Array | None:
    """None, or `as_array`."""
    return None if value is None else as_array(name, value)


def require_floats(operation: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless all are of real floating-point dtypes."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{operation}: {name} has the dtype {array.dtype}: expected floating point"
            )


def require_type(name: str, value: Any, *kinds: type, hint: str = "") -> None:
    """Raises ValueError for a value of none of these types; `hint` ends its message."""
    if not isinstance(value, kinds):
        expected = " or ".join("a text" if kind is str else f"a {kind.__name__}" for kind in kinds)
        raise ValueError(f"{name} is {shown(value)}: expected {expected}{hint}")


def as_dtype(name: str, value: Any, *, kind: Any = jnp.floating) -> jnp.dtype:
    """A dtype of what NumPy and JAX take for one, short names (`bf16`, `fp16`) and PyTorch's.

    Raises ValueError for anything else, and for a dtype that is not of the kind.
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
    number = _python_number(name, value, read)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {shown(value)}: expected {expected}, or None")
    return number


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """A whole number that shapes depend on, as Python's.

    Raises ValueError for another one, one below `least`, and one that is traced.
    """
    number = _python_number(name, value, operator.index)
    if not number >= least:
        raise ValueError(f"{name} is {shown(value)}: expected {least} or more, a whole number")
    return number


def norm_epsilon(name: str, value: Any) -> float:
    """The number that a norm adds to a mean square, as Python's.

    Raises ValueError for what is no finite number, one below 0, and one that is traced.
    """
    number = _python_number(name, value, float)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {shown(value)}: expected a finite number, 0 or above")
    return number


def _python_number(name: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of a number; NaN of what it can't read, of texts and of bools."""
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
    """Whether no number of x is NaN or infinite; takes no memory beside x.

    Zero times any of these is NaN. In float32 a maximum would not do: on a CPU, XLA's passes over
    NaN. In float16 it does not, and a sum would first write all of x out in float32.
    """
    if x.dtype == jnp.float16:
        return jnp.isfinite(x.max()) & jnp.isfinite(x.min())
    return jnp.isfinite((x * 0).sum())
