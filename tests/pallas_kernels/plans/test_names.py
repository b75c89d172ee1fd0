from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from mpjax.kernels.plans.names import require_values

pytestmark = pytest.mark.any_version


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields of every type that a configuration has."""

    tile: int
    stages: int = 2
    more: int = 0
    width: int | None = None
    order: Literal["rows", "columns"] = "rows"
    is_split: bool = False


def test_values_that_fit():
    require_values(Config, {"tile": 1, "more": 0, "width": 8, "order": "columns"})
    require_values(Config, {"tile": 1, "is_split": True})


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
