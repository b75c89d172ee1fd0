from __future__ import annotations

import pytest

from mpjax.files.json_text import json_text

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([True, {"a": False}], '[true, {"a": false}]'),
        ("größer", '"größer"'),
        ("\udcff", '"\\udcff"'),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1"),
    ],
)
def test_values_are_spelled_as_in_json(value, text):
    assert json_text(value) == text
