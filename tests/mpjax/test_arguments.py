from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.arguments import new_token_limits, read_text, require_documents, require_known_ids


@pytest.mark.parametrize("limits", [(0, 1), (4, 4), (np.int64(2), np.int32(3)), (0, jnp.int32(2))])
def test_limits_become_plain_numbers(limits):
    found = new_token_limits(*limits)
    assert found == tuple(int(limit) for limit in limits)
    assert [type(limit) for limit in found] == [int, int]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 0), "min_new_tokens is 0 and max_new_tokens 0; .* at least one new token"),
        ((9, 4), "min_new_tokens is 9 and max_new_tokens 4"),
        ((-1, 4), "min_new_tokens is -1"),
        ((0, 4.0), r"max_new_tokens is 4\.0; it must be a whole number"),
        ((0, "4"), "max_new_tokens is '4'; it must be a whole number"),
        ((0.5, 4), r"min_new_tokens is 0\.5; it must be a whole number"),
    ],
)
def test_limits_that_no_row_can_keep(limits, message):
    with pytest.raises(ValueError, match=message):
        new_token_limits(*limits)


def test_a_traced_minimum_is_left_alone():
    found = jax.jit(lambda minimum: new_token_limits(minimum, np.int64(4))[0])(jnp.int32(9))
    assert found == 9


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
