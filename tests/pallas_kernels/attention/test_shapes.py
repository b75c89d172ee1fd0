from __future__ import annotations

import pytest

from mpjax.kernels.attention import shapes

ALL = (*shapes.DECODE, *shapes.RAGGED, *shapes.PREFILL, *shapes.SMALL)


def test_names_are_unique_and_say_everything():
    names = [shape.name for shape in ALL]
    assert len(set(names)) == len(names)
    assert shapes.AttentionShape(8, 32, 4, 128, 4096).name == "b8-h32/4-d128-c4096"
    assert shapes.PREFILL[0].name == "b1-h32/8-d128-c32768-q2048"
    assert shapes.RAGGED[0].name == "b8-h32/8-d128-c1024-l16384"


def test_one_sequence_may_be_longer():
    assert shapes.AttentionShape(3, 2, 1, 64, 10, longest=17).lengths == (17, 10, 10)
    assert shapes.AttentionShape(2, 2, 1, 64, 10).lengths == (10, 10)


def test_a_name_says_its_shape():
    for shape in ALL:
        assert shapes.AttentionShape.parse(shape.name) == shape


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("b8-h32-d128-c32768", "unknown shape 'b8-h32-d128-c32768': expected the batch"),
        ("b8-h32/8-d128-c32768-q", "unknown shape"),
        ("b0-h32/8-d128-c32768", "its numbers are positive"),
        ("b8-h32/5-d128-c32768", "a multiple of KV heads"),
        ("b8-h32/8-d128-c10-q11", "more new tokens than its context"),
        ("b8-h32/8-d128-c10-q2-l11", "unknown shape"),
        ("b1-h32/8-d128-c10-l9", "the longest context of .* is no longer than the others"),
        ("b8-h32/8-d128-c10-l10", "the longest context of .* is no longer than the others"),
        ("b8-h32/8-d128-c10-l0", "its numbers are positive"),
    ],
)
def test_names_that_say_no_shape(name, reason):
    with pytest.raises(ValueError, match=reason):
        shapes.AttentionShape.parse(name)


def test_query_heads_are_a_multiple_of_key_heads():
    for shape in ALL:
        assert shape.query_heads % shape.kv_heads == 0


def test_small_shapes_have_grouped_multi_query_and_ungrouped_heads():
    kinds = {(shape.kv_heads == 1, shape.query_heads == shape.kv_heads) for shape in shapes.SMALL}
    assert kinds == {(False, False), (True, False), (False, True)}
