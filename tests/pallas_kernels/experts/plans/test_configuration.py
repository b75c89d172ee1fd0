from __future__ import annotations

import pytest

from mpjax.kernels.experts.plans import ExpertsConfig, ExpertsWarpgroupConfig


def test_its_text_says_how_tiles_are_found():
    text = str(ExpertsConfig(16, 64, 2, 4, 3, tiling="counted"))
    assert text.startswith("16x64, 2 splits")
    assert text.endswith("tiles counted")
    text = str(ExpertsWarpgroupConfig(96, 2, 1, tiling="counted"))
    assert text == "96x128, 1 splits, tiles counted"


def test_warpgroups_have_no_tile_for_each_pair():
    with pytest.raises(ValueError, match="tiling is 'pairs', expected one of"):
        ExpertsWarpgroupConfig(96, 2, 1, tiling="pairs")
