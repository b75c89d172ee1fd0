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


def test_reports_of_the_same_and_of_other_prompts_are_joined():
    first, second = SpeculationReport([8], [6], [4], [10]), SpeculationReport([1], [0], [2], [3])
    assert first + second == SpeculationReport([9], [6], [6], [13])
    joined = SpeculationReport.join([first, None, second])
    assert joined == SpeculationReport([8, 0, 1], [6, 0, 0], [4, 0, 2], [10, 0, 3])
    assert SpeculationReport.join([None, None]) is None


def test_nothing_is_divided_by_zero():
    report = SpeculationReport([0], [0], [0], [0])
    assert report.acceptance == report.tokens_per_step == 0
    assert str(report) == "nothing proposed"
