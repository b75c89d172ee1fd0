from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.json_text import in_utf8
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


def test_keys_that_are_missing_or_null_have_their_defaults():
    assert read_keys({}, TABLE) == DEFAULTS
    assert read_keys(dict.fromkeys([*TABLE, "unknown"]), TABLE) == DEFAULTS


def test_values_are_read():
    found = read_keys({"count": 4.0, "rate": 2, "on": True, "note": [1], "extra": 1.0}, TABLE)
    assert found == DEFAULTS | {"count": 4, "rate": 2.0, "on": True}
    assert type(found["count"]) is int
    assert read_keys({"inner": {"beside": 1}, "extra": {"a": [0]}}, TABLE)["inner"] == {
        "deep": False
    }


@pytest.mark.parametrize(
    ("body", "message", "parameter", "code"),
    [
        ({"count": 11}, "count is 11: expected a whole number from 0 to 10", "count", None),
        ({"count": 2.5}, "count is 2.5: expected a whole", "count", None),
        ({"count": True}, "count is true: expected a whole", "count", None),
        ({"rate": -1}, "rate is -1: expected a number of 0 or more", "rate", None),
        ({"rate": math.nan}, "rate is NaN: expected a number", "rate", None),
        ({"rate": 10**400}, "rate is 1000.*: expected a number", "rate", None),
        ({"name": 5}, "name is 5: expected a text", "name", None),
        ({"inner": []}, r"inner is \[\]: expected an object with deep", "inner", None),
        ({"inner": {"deep": 1}}, "inner.deep is 1: expected true or false", "inner.deep", None),
        ({"inner": {"dep": 1}}, r"did you mean 'deep'", "inner.dep", "unknown_parameter"),
        ({"nam": 1}, r"\"nam\" is no key .*did you mean 'name'", "nam", "unknown_parameter"),
        (
            {"extra": True},
            r'extra is true, and this server does not offer it: expected null or 1 or \{"a": \[0\]',
            "extra",
            "unsupported_parameter",
        ),
        ({"\ud800": 1}, r'"\\ud800" is no key of this request', r"\ud800", "unknown_parameter"),
    ],
)
def test_what_is_wrong_is_named(body, message, parameter, code):
    with pytest.raises(RequestError, match=message) as error:
        read_keys(body, TABLE)
    assert (error.value.parameter, error.value.code) == (parameter, code)


def test_unknown_keys_may_be_ignored_and_known_ones_not():
    assert read_keys({"unknown": 1}, TABLE, ignore_unknown=True) == DEFAULTS
    for body in ({"count": 11}, {"extra": 2}):
        with pytest.raises(RequestError):
            read_keys(body, TABLE, ignore_unknown=True)


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
