from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.gemm import epilogue
from pallas_kernels.gemm.config import CHANNELS, WarpgroupConfig
from pallas_kernels.gemm.stages import sent_bytes
from tests.pallas_kernels.gemm.test_mosaic import interpreted_here

FLOAT = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    "config",
    [
        *(WarpgroupConfig(16, 3, 1), WarpgroupConfig(8, 4, 1, 4), WarpgroupConfig(32, 2, 3, 2)),
        *(WarpgroupConfig(32, 4, 2, 2), WarpgroupConfig(24, 3, 2, 3), WarpgroupConfig(8, 2, 2)),
    ],
    ids=str,
)
def test_there_is_room_for_what_is_sent(config):
    arrays = epilogue.scratch(config, FLOAT, is_cluster=config.is_cluster)
    sums = [array for name, array in arrays.items() if name.endswith("_sums")]
    assert sum(4 * math.prod(array.shape) for array in sums) == sent_bytes(config)


def test_what_nobody_sends_takes_nothing():
    assert epilogue.scratch(WarpgroupConfig(16, 3, 4), FLOAT, is_cluster=False) == {}


@interpreted_here
@pytest.mark.parametrize(("warpgroups", "shares"), [(3, 1), (3, 3), (4, 2)])
def test_warpgroups_that_share_outputs_are_added(warpgroups, shares):
    config = WarpgroupConfig(8, warpgroups, 1, shares)
    columns = warpgroups // shares

    def kernel(x_ref, out_ref, **joining):
        warpgroup = jax.lax.axis_index("warpgroup")
        column = jax.lax.rem(warpgroup, columns)

        def finish(sums, row):
            assert row == 0
            out_ref[column] = sums[0]

        @pl.when(warpgroup < warpgroups)
        def _end():
            place = {"column": column, "share": warpgroup // columns, "rank": 0, "axis": None}
            end = epilogue.Epilogue(**place, **joining, finish=finish, interpret=True)
            end.run([x_ref[warpgroup]])

    rng = np.random.default_rng(0)
    x = rng.integers(-99, 99, (warpgroups, CHANNELS, 8)).astype(np.float32)
    out = mosaic.launch(
        kernel,
        jnp.asarray(x),
        out_shape=jax.ShapeDtypeStruct((columns, CHANNELS, 8), FLOAT),
        grid={"row": 1},
        warpgroups=warpgroups,
        scratch=epilogue.scratch(config, FLOAT, is_cluster=False),
        name="epilogue",
        interpret=True,
    )
    np.testing.assert_array_equal(out, x.reshape(shares, columns, CHANNELS, 8).sum(0))
