from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.checks import (
    are_between,
    are_finite,
    as_array,
    as_arrays,
    as_dtype,
    did_you_mean,
    is_known,
    nearest,
    norm_epsilon,
    optional_array,
    require_floats,
    require_type,
    shown,
    static_number,
    whole_number,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"),
        ([1, 2], "[1, 2]"),
        (np.zeros((2, 3)), "float64 of shape (2, 3)"),
        (jnp.zeros(4, jnp.int32), "int32 of shape (4,)"),
        ("x" * 99, "'" + "x" * 59 + "..."),
    ],
)
def test_values_are_shown_on_one_line(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], "int32"),
        ([[0.5, 1], [2, 3]], "float32"),
        (np.arange(3), "int32"),
        (np.ones(2), "float32"),
        (np.ones(2, jnp.bfloat16), "bfloat16"),
        (3, "int32"),
        ([jnp.int32(1), 2], "int32"),
        ([], "float32"),
        ([True], "bool"),
    ],
)
def test_arrays_of_what_people_have(value, dtype):
    array = as_array("x", value)
    assert isinstance(array, jax.Array)
    assert array.dtype == dtype
    np.testing.assert_array_equal(np.asarray(array), np.asarray(value))


def test_an_array_stays_what_it_is():
    x = jnp.ones(3)
    assert as_array("x", x) is x
    assert as_arrays("f", x=x, y=[1])[0] is x
    assert optional_array("x", None) is None
    assert optional_array("x", x) is x
    traced = []
    jax.jit(lambda x: traced.append(as_array("x", x) is x))(x)
    assert traced == [True]


def test_what_is_given_to_a_traced_function_remains_known():
    """Constants of a program are checked, too: what JAX makes inside of a `jit` is traced."""

    def program(x):
        starts = as_array("starts", [0, 1])
        assert is_known(starts)
        assert starts.dtype == jnp.int32
        mixed = as_array("mixed", [x[0], 1.0])
        assert not is_known(mixed)
        return x + starts.astype(jnp.float32), mixed

    np.testing.assert_array_equal(jax.jit(program)(jnp.ones(2))[0], [1, 2])


@pytest.mark.parametrize(
    "value",
    [None, "text", b"x", [[1], [1, 2]], {}, object(), [None], 10**10, np.array([2**40]), 1j],
)
def test_what_is_no_array_of_real_numbers(value):
    with pytest.raises(ValueError, match=r"^f: x is .*: expected an array of real numbers$"):
        as_arrays("f", x=value)


def test_floats_are_required_of_all():
    require_floats("f", x=jnp.ones(2), y=jnp.ones(2, jnp.bfloat16))
    with pytest.raises(ValueError, match="f: y has the dtype int32: expected floating point"):
        require_floats("f", x=jnp.ones(2), y=jnp.ones(2, jnp.int32))


def test_types_are_required_by_name():
    require_type("x", True, bool, int)
    with pytest.raises(ValueError, match=r"x is 2.5: expected a text or a bool, such as 'y'"):
        require_type("x", 2.5, str, bool, hint=", such as 'y'")


class TorchDtype:
    """Looks like a dtype of PyTorch."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        (TorchDtype(), "bfloat16"),
        ("torch.float16", "float16"),
        ("fp16", "float16"),
        ("f16", "float16"),
        ("half", "float16"),
        (np.float16, "float16"),
        ("fp32", "float32"),
        ("f32", "float32"),
        ("float", "float32"),
        ("single", "float32"),
        (jnp.float32, "float32"),
        (np.dtype("float32"), "float32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_by_their_usual_names(value, name):
    assert as_dtype("dtype", value) == jnp.dtype(name)


@pytest.mark.parametrize(
    "value", [None, "bf17", "auto", 16, object(), np.ones(2), jnp.ones(2), {}, "int32", int]
)
def test_what_is_no_floating_point_dtype(value):
    with pytest.raises(ValueError, match=r"dtype is .*: expected a dtype, such as bfloat16, float"):
        as_dtype("dtype", value)


def test_other_kinds_of_dtypes_where_they_are_asked_for():
    assert as_dtype("dtype", "int32", kind=jnp.number) == jnp.int32


def test_nearest():
    assert nearest("uint4:128", ["uint8:g128", "uint4:g128"]) == "uint4:g128"
    assert nearest("zzz", ["uint8:g128", "uint4:g128"]) is None
    assert did_you_mean("uint4:g128") == " (did you mean 'uint4:g128'?)"
    assert did_you_mean(None) == ""


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", None, True, [1], jnp.ones(2, jnp.int32)])
def test_whole_numbers_from_one_on(value):
    assert whole_number("n", np.int64(3)) == whole_number("n", jnp.int32(3)) == 3
    assert whole_number("n", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"n is .*: expected 1 or more, a whole number"):
        whole_number("n", value)


@pytest.mark.parametrize("value", [-1e-6, np.nan, np.inf, "1e-6", None, [1e-6]])
def test_epsilons(value):
    assert norm_epsilon("e", 0) == 0.0
    assert norm_epsilon("e", np.float32(0.5)) == 0.5
    with pytest.raises(ValueError, match=r"e is .*: expected a finite number, 0 or above"):
        norm_epsilon("e", value)


@pytest.mark.parametrize("read", [whole_number, norm_epsilon])
def test_what_programs_are_compiled_for_is_not_traced(read):
    with pytest.raises(ValueError, match=r"n is traced, .* static_argnames of jit"):
        jax.jit(lambda n: read("n", n))(1)


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
