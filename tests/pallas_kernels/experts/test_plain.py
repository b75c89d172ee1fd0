from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.experts import triton
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.plain import steps_of
from mpjax.kernels.experts.plans import PLAIN_CHANNELS
from mpjax.kernels.experts.tiles import sorted_by_expert
from mpjax.kernels.gemm.plans import TritonConfig
from tests.pallas_kernels.experts.cases import EXPERTS, ROUTINGS, expected
from tests.pallas_kernels.oracles import GATES, random_array, relative_error, wide


def test_steps():
    assert [steps_of(channels) for channels in (1, PLAIN_CHANNELS, PLAIN_CHANNELS + 1)] == [1, 1, 2]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("channels", "outputs"), [(128, 32), (100, 40)])
def test_matrices_that_tiles_divide_or_not(channels, outputs, rng):
    experts = ROUTINGS["mixed"]
    x = random_array(rng, (5, channels), "float16")
    weight = random_array(rng, (EXPERTS, channels, outputs), "bfloat16")
    tiles = sorted_by_expert(jnp.asarray(experts), EXPERTS, 8)
    config = TritonConfig(8, 32, 2, 2, 2)
    found = triton.products(
        x, weight, tiles, Epilogue(), config, jnp.dtype("float32"), interpret=True
    )
    whole = expected(wide(x), wide(weight), experts)
    assert len(found) == 2
    assert relative_error(np.asarray(found.sum(0)).reshape(whole.shape), whole) < GATES["float16"]
