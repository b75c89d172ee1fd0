from __future__ import annotations

import pytest

from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.cost_model import microseconds
from tests.pallas_kernels.gemm.plans.problems import product

PACKED, TABLE3, TABLE4 = "uint4:g128", "table3:g64", "table4:g64"
MATRIX, LEVELS = "int8/int8", "liquid4:g64/int8"


@pytest.mark.parametrize(
    ("text", "config", "all_rows"),
    [
        (PACKED, WarpgroupConfig(128, 3, 1), (128, 256, 512)),
        (MATRIX, WarpgroupConfig(256, 2, 1), (512, 1024, 2048)),
        (LEVELS, WarpgroupConfig(256, 2, 1), (512, 1024, 2048)),
    ],
    ids=["uint4", "int8", "liquid4"],
)
def test_times_grow_with_the_product(text, config, all_rows):
    times = [microseconds(config, product(rows, text=text)) for rows in all_rows]
    assert times == sorted(times)
    assert times[2] > 1.8 * times[1]


@pytest.mark.parametrize(
    ("text", "rows", "channels", "outputs", "config", "measured"),
    [
        (PACKED, 16, 12288, 4096, (16, 2, 2, 2), 11.0),
        (PACKED, 16, 4096, 24576, (16, 3, 1), 17.1),
        (PACKED, 32, 4096, 6144, (32, 2, 1, 2), 8.5),
        (PACKED, 64, 4096, 24576, (64, 3, 1), 25.0),
        (PACKED, 1024, 4096, 24576, (256, 2, 1), 250.4),
        (TABLE4, 16, 12288, 4096, (16, 3, 2, 3), 12.7),
        (TABLE4, 128, 4096, 24576, (128, 3, 1), 37.8),
        (TABLE3, 16, 4096, 24576, (16, 3, 1), 20.2),
        (TABLE3, 256, 4096, 24576, (128, 3, 1), 76.8),
        (MATRIX, 256, 12288, 4096, (64, 2, 1), 22.0),
        (MATRIX, 4096, 4096, 24576, (256, 2, 1), 558.5),
        (LEVELS, 64, 4096, 24576, (64, 3, 1), 20.9),
        (LEVELS, 256, 12288, 4096, (128, 3, 3), 27.4),
        (LEVELS, 4096, 4096, 24576, (256, 2, 1), 553.4),
    ],
)
def test_times_are_about_what_was_measured(text, rows, channels, outputs, config, measured):
    time = microseconds(WarpgroupConfig(*config), product(rows, channels, outputs, text))
    assert time == pytest.approx(measured, rel=0.15)


def test_what_sums_splits_takes_time():
    alone, of_two, of_three = (
        microseconds(WarpgroupConfig(64, 2, splits), product(64, outputs=57344))
        for splits in (1, 2, 3)
    )
    assert alone < of_two < of_three
