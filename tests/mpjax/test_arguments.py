from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.arguments import (
    compute_dtype,
    most_new_tokens,
    positive_whole,
    read_text,
    require_documents,
    require_known_ids,
    stop_strings,
)
from mpjax.precision import Precision


@pytest.mark.parametrize(
    ("maximum", "minimum"),
    [(1, None), (4, 4), (np.int32(3), np.int64(2)), (jnp.int32(2), 0), (5, np.array([5, 0, 2]))],
)
def test_the_maximum_becomes_a_plain_number(maximum, minimum):
    found = most_new_tokens(maximum, minimum)
    assert found == int(maximum)
    assert type(found) is int


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 0), "max_new_tokens is 0: expected at least one new token"),
        ((4, 9), "min_new_tokens is 9 and max_new_tokens 4"),
        ((4, np.array([0, 5])), r"min_new_tokens is \[0 5\] and max_new_tokens 4"),
        ((4.0, 0), r"max_new_tokens is 4\.0: expected a whole number"),
        (("4", None), "max_new_tokens is '4': expected a whole number"),
    ],
)
def test_limits_that_no_row_can_keep(limits, message):
    with pytest.raises(ValueError, match=message):
        most_new_tokens(*limits)


def test_a_request_that_draws_nothing_has_no_minimum():
    assert most_new_tokens(np.int64(0), 3, least=0) == 0
    with pytest.raises(ValueError, match="max_new_tokens is -1: expected 0 or more new tokens"):
        most_new_tokens(-1, least=0)


def test_positive_whole_numbers():
    assert positive_whole("n", np.int64(3)) == 3
    for value, message in (
        (0, "n is 0: expected a positive whole number"),
        (-1, "n is -1: expected"),
        (2.0, r"n is 2\.0: expected a whole number"),
        ("8", "n is '8': expected a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            positive_whole("n", value)


def test_a_traced_minimum_is_left_alone():
    jax.jit(lambda minimum: most_new_tokens(np.int64(4), minimum))(jnp.int32(9))


def test_ids_without_an_embedding_are_refused():
    require_known_ids([[0, 9], [], np.asarray([5])], 10)
    for ids, wrong in (([3, 10], 10), ([0, 10], 10), (np.asarray([-1, 4]), -1)):
        message = f"gave token {wrong}, and the model knows 0 to 9: .* not from the same"
        with pytest.raises(ValueError, match=message):
            require_known_ids([[0], [], ids], 10)


def test_a_text_is_no_list_of_documents():
    require_documents(["a text"])
    with pytest.raises(ValueError, match=r"^documents is a text: pass a list, \[text\]$"):
        require_documents("a text")
    for other in (None, 3, [b"bytes"], ["a", 1], jnp.ones(())):
        with pytest.raises(ValueError, match=r"documents is .*: expected a list of texts"):
            require_documents(other)


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        (None, None, None),
        ("bf16", None, "bfloat16"),
        (jnp.float16, "W4A16KV8", "float16"),
        ("fp32", "A16KV8", "float32"),  # activations that aren't rounded
        (None, "A32KV8", "float32"),
        (np.float32, "W32A32KV16", "float32"),
    ],
)
def test_the_dtype_to_compute_in(dtype, precision, expected):
    parsed = None if precision is None else Precision.parse(precision)
    assert compute_dtype(dtype, parsed) == expected


@pytest.mark.parametrize(
    ("dtype", "precision", "message"),
    [
        ("int8", "A16KV8", "dtype is int8: expected one of bfloat16, float16, float32$"),
        (float, "A16KV8", "dtype is float64: expected one of bfloat16"),
        ("auto", "A16KV8", "dtype is 'auto': expected a dtype, such as bfloat16"),
        (16, "A16KV8", "dtype is 16: expected a dtype"),
        ("bf16", "W4A32KV8", "precision is W4A32KV8, which is float32, and dtype is bfloat16"),
    ],
)
def test_dtypes_that_no_model_computes_in(dtype, precision, message):
    with pytest.raises(ValueError, match=message):
        compute_dtype(dtype, Precision.parse(precision))


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, []), ((), []), ("end", ["end"]), (["a", "b"], ["a", "b"]), (iter("ab"), ["a", "b"])],
)
def test_stop_strings(stop, expected):
    assert stop_strings(stop) == expected


@pytest.mark.parametrize("stop", [3, b"end", [b"end"], ["a", 1], jnp.ones(()), object()])
def test_stop_strings_are_texts(stop):
    with pytest.raises(ValueError, match=r"stop has .*: expected a string, or a list"):
        stop_strings(stop)


def test_a_stop_string_is_not_empty():
    with pytest.raises(ValueError, match="stop has an empty string, which would end every text"):
        stop_strings(["a", ""])


def test_line_ends_stay_as_they_are(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a\r\nb\rc\nd\r\n")
    assert read_text(path) == "a\r\nb\rc\nd\r\n"


def test_a_file_of_another_encoding_is_named(tmp_path):
    path = tmp_path / "größe.txt"
    path.write_text("größer\n", encoding="utf-8")
    assert read_text(path) == read_text(str(path)) == "größer\n"
    path.write_bytes("größer".encode("latin-1"))
    with pytest.raises(ValueError, match=r"größe\.txt is not a text in UTF-8: byte 2 is 0xf6"):
        read_text(path)
