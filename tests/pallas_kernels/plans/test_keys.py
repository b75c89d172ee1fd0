"""Keys of tables and their names."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import pytest

from mpjax.kernels.plans.names import require_values
from tests.pallas_kernels.plans.sums import SUMS


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields of every type that a configuration has."""

    tile: int
    stages: int = 2
    more: int = 0
    width: int | None = None
    order: Literal["rows", "columns"] = "rows"
    is_split: bool = False


@pytest.mark.any_version
def test_values_that_fit():
    require_values(Config, {"tile": 1, "more": 0, "width": 8, "order": "columns"})
    require_values(Config, {"tile": 1, "is_split": True})


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tile": 0}, "tile is 0, expected a positive integer"),
        ({"tile": True}, "tile is True, expected a positive integer"),
        ({"stages": 2.0}, "stages is 2.0, expected a positive integer"),
        ({"more": -1}, "more is -1, expected an integer from 0 on"),
        ({"width": "8"}, "width is '8', expected a positive integer"),
        ({"order": "both"}, r"order is 'both', expected one of \('rows', 'columns'\)"),
        ({"is_split": 0}, "is_split is 0, expected true or false"),
    ],
)
def test_values_that_do_not(values, reason):
    with pytest.raises(ValueError, match=reason):
        require_values(Config, values)


class Key(NamedTuple):
    """The key of a product that there is not."""

    format: str
    channels: int
    outputs: int
    gated: bool
    rows: int


def bucketed(key):
    return key._replace(format=key.format.lower(), rows=1 << (key.rows - 1).bit_length())


# Rows are planned by powers of two, and formats are written in lower case.
PRODUCTS = dataclasses.replace(
    SUMS,
    keys=Key,
    levels=("{format}", "{channels}x{outputs}{gated: gated}", "{rows}"),
    exact=lambda problem: problem,
    bucketed=bucketed,
)
KEY = Key("uint4", 64, 128, True, 16)


@pytest.mark.any_version
@pytest.mark.parametrize("key", [KEY, KEY._replace(gated=False, rows=1)])
def test_names_and_keys(key):
    assert PRODUCTS.key(PRODUCTS.names_of(key)) == key
    assert PRODUCTS.names_of(KEY) == ("uint4", "64x128 gated", "16")


@pytest.mark.any_version
def test_a_key_is_of_the_bucket():
    assert PRODUCTS.key_of(KEY._replace(rows=13, format="UINT4")) == KEY


@pytest.mark.any_version
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
