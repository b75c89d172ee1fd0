from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.checks import are_between, are_finite, is_known, static_number


def test_what_is_traced_is_not_known():
    known = []
    jax.jit(lambda x: known.append(is_known({"tree": (1, x)})))(1)
    assert [is_known(None), is_known((1, jnp.ones(2))), *known] == [True, True, False]


@pytest.mark.parametrize("kind", [tuple, np.asarray, jnp.asarray])
def test_numbers_are_between_limits_or_not_known(kind):
    assert are_between(kind([0, 3]), 0, 3)
    assert not are_between(kind([-1, 3]), 0, 3)
    assert not are_between(kind([0, 4]), 0, 3)
    jax.jit(lambda x: None if are_between(x, 0, 3) else pytest.fail("it is traced"))(jnp.int32(9))


@pytest.mark.parametrize(
    ("value", "read", "expected"),
    [
        (None, float, None),
        (2, float, 2.0),
        (np.float32(0.5), float, 0.5),
        (jnp.float32(0.5), float, 0.5),
        (np.int32(7), operator.index, 7),
        (jnp.int32(7), operator.index, 7),
    ],
)
def test_static_numbers_become_pythons(value, read, expected):
    found = static_number("x", value, read, "a number")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        *((number, float) for number in (0, -1.0, np.nan, np.inf, "0.5", (1, 2), 10**400)),
        *((number, operator.index) for number in (0, -1, 3.5, 3.0, "3", True)),
    ],
)
def test_static_numbers_that_there_cannot_be(value, read):
    with pytest.raises(ValueError, match=r"f: x is .*: expected a number, or None"):
        static_number("f: x", value, read, "a number")


def test_static_numbers_are_not_traced():
    read = jax.jit(lambda x: static_number("f: x", x, float, "a number"))
    with pytest.raises(ValueError, match=r"f: x is traced, .* static_argnames of jit"):
        read(0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(33,), (256, 128), (512, 300)])
def test_one_number_that_is_none_is_found(shape, dtype, rng):
    """Also where a maximum on a CPU passes over NaN: in large float32 matrices."""
    values = np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))
    assert are_finite(values)
    for place in (0, values.size // 2, values.size - 1):
        for damage in (np.nan, np.inf, -np.inf):
            damaged = values.copy()
            damaged.flat[place] = damage
            assert not are_finite(damaged)


def test_integers_are_finite():
    assert are_finite(jnp.arange(3, dtype=jnp.uint16))
