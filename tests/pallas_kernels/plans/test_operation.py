from __future__ import annotations

from typing import NamedTuple

import pytest

from mpjax.kernels.plans.operation import Operation
from mpjax.kernels.plans.plan import Entry, Plan

pytestmark = pytest.mark.any_version


class Key(NamedTuple):
    """The key of a product that there is not."""

    format: str
    channels: int
    outputs: int
    gated: bool
    rows: int


class Products(Operation):
    """Rows are planned by powers of two, and formats are written in lower case."""

    name = "products"
    keys = Key
    levels = ("{format}", "{channels}x{outputs}{gated: gated}", "{rows}")
    configs = {"plain": None}  # noqa: RUF012

    def exact(self, problem):
        return problem

    def bucketed(self, key):
        return key._replace(format=key.format.lower(), rows=1 << (key.rows - 1).bit_length())

    def rule(self, problem):
        return Plan("plain")


PRODUCTS = Products()
KEY = Key("uint4", 64, 128, True, 16)


@pytest.mark.parametrize("key", [KEY, KEY._replace(gated=False, rows=1)])
def test_names_and_keys(key):
    assert PRODUCTS.key(PRODUCTS.names_of(key)) == key
    assert PRODUCTS.names_of(KEY) == ("uint4", "64x128 gated", "16")


def test_a_key_is_of_the_bucket():
    assert PRODUCTS.key_of(KEY._replace(rows=13, format="UINT4")) == KEY


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("uint4", "64", "16"), r"'64' is not of the form 'channelsxoutputs\[ gated\]'"),
        (("uint4", "64x128 GATED", "16"), "'64x128 GATED' is not of the form"),
        (("uint4", "64x0", "16"), "'64x0' is not of the form"),
        (("uint4", "64x128", "four"), "'four' is not of the form 'rows'"),
        (("uint4", "64x128", "17"), "uint4 64x128 17: in a table this is uint4 64x128 32"),
        (("UINT4", "64x128", "16"), "UINT4 64x128 16: in a table this is uint4 64x128 16"),
    ],
)
def test_names_that_are_no_keys(names, reason):
    with pytest.raises(ValueError, match=reason):
        PRODUCTS.key(names)


def test_what_an_operation_need_not_say():
    assert PRODUCTS.candidates(KEY, 9) == [Plan("plain")]
    assert PRODUCTS.suits(KEY, Plan("plain"))
    assert PRODUCTS.why_damaged(KEY, Plan("plain")) is None
    assert PRODUCTS.find({KEY: Entry(Plan("plain"), 1.0)}, KEY) == Entry(Plan("plain"), 1.0)
