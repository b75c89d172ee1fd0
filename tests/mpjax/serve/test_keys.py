from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.files.json_text import in_utf8
from mpjax.serve.errors import RequestError
from mpjax.serve.keys import flag, ignored, number, read_keys, record, refused, text, whole

pytestmark = pytest.mark.any_version

INNER = {"deep": flag(), "beside": ignored()}
TABLE = {
    "count": whole(0, 10).or_else(3),
    "rate": number(0),
    "on": flag(),
    "name": text(),
    "note": ignored(),
    "extra": refused(1, {"a": [0]}),
    "inner": record("inner", INNER),
}
DEFAULTS = {"count": 3, "rate": None, "on": False, "name": None, "inner": None}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def test_values_are_read():
    found = read_keys({"count": 4.0, "rate": 2, "on": True, "note": [1], "extra": 1.0}, TABLE)
    assert found == DEFAULTS | {"count": 4, "rate": 2.0, "on": True}
    assert type(found["count"]) is int
    assert read_keys({"inner": {"beside": 1}, "extra": {"a": [0]}}, TABLE)["inner"] == {
        "deep": False
    }


@given(st.dictionaries(st.sampled_from([*TABLE, "unknown"]) | st.text(), JSON))
def test_any_object_is_read_or_refused_by_the_name_of_one_of_its_keys(body):
    refusal = None
    try:
        assert read_keys(body, TABLE).keys() == DEFAULTS.keys()
    except RequestError as error:
        refusal = error
    if refusal is not None:
        names = set(map(in_utf8, body))
        assert refusal.parameter in names or refusal.parameter.split(".")[0] in names
        str(refusal).encode()
