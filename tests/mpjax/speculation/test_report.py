"""The report of a batch's speculation."""

from __future__ import annotations

import pytest

from mpjax import SpeculationReport

pytestmark = pytest.mark.any_version


def test_it_sums_over_rows():
    report = SpeculationReport([8, 0], [6, 0], [4, 10], [10, 10])
    assert report.acceptance == 6 / 8
    assert report.tokens_per_step == 20 / 14
    assert str(report) == "1.43 tokens/step, 75% of 8 proposed tokens accepted"


def test_nothing_is_divided_by_zero():
    report = SpeculationReport([0], [0], [0], [0])
    assert report.acceptance == report.tokens_per_step == 0
    assert str(report) == "nothing proposed"
