from __future__ import annotations

import pytest

from mpjax.kernels.cutting import Run
from mpjax.models.window import Window

pytestmark = pytest.mark.any_version


def test_a_window_lies_around_runs():
    runs = [Run(8, 12, 4), Run(2, 5, 4), Run(20, 20, 4)]
    assert Window.around(True, runs) == Window(True, 2, 12)
    assert Window.around(False, runs[2:]) == Window(False, 0, 1)  # a map has a channel or more
    assert Window(True, 2, 12).length == 10


def test_a_window_of_whole_units_ends_with_the_channels():
    assert Window(True, 5, 9).widened(4, 100) == Window(True, 4, 12)
    assert Window(True, 5, 9).widened(4, 10) == Window(True, 4, 10)


def test_a_window_of_experts():
    experts = Window.around(False, [Run(2, 4, 2)])._replace(is_of_experts=True)
    assert (experts.length, experts.is_of_experts) == (2, True)


def test_the_shape_of_a_window():
    assert Window(True, 2, 5).of((8, 9)) == (3, 9)
    assert Window(False, 2, 5).of((8, 9)) == (8, 3)
